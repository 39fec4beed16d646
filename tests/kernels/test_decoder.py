"""The decode path of a tiny model on Triton kernels, compared with `naive`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import Backend, forced
from tests.tiny import GEMMA, ModelRunner, tiny_model
from tests.util import assert_close

BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "mqa-d24-biases-split": {
        **BIASES, "num_heads": 8, "num_kv_heads": 1, "head_dim": 24, "num_layers": 1,
        "intermediate_size": 1152,
    },
    **GEMMA,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about padding, which may be NaN
@pytest.mark.parametrize("name", MODELS)
def test_kernels_match_naive(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second, third, last = (torch.randint(64, (n,), generator=generator) for n in (20, 5, 4, 1))

    def logits(backend: Backend) -> Tensor:
        with forced(backend):
            runner = ModelRunner(tiny_model(**MODELS[name]), 2, 64)
            steps = runner.step({0: first, 1: second}), runner.step({0: third, 1: last}, pad_to=5)
        return torch.cat([step[row] for step in steps for row in (0, 1)])

    assert_close(logits("triton"), logits("naive"), 2e-5, name)
