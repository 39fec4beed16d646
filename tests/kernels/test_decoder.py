"""The decode path of a tiny model on Triton kernels: comparison with `naive`, and bitwise identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import forced
from nanospec.models.decoder import Model
from tests.tiny import GEMMA, ModelRunner, tiny_model
from tests.util import assert_close

# Results of padding are unspecified, possibly NaN, about which numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"hidden_size": 96},
    "mqa-d24-biases": {
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 24,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    "qk-norm-window9": {"qk_norm": True, "windows": (9, None)},
    "split-k": {"intermediate_size": 1152, "num_layers": 1},
    **GEMMA,
}


def tokens(model: Model, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_match_naive(name: str) -> None:
    logits = {}
    for backend in ("naive", "triton"):
        with forced(backend):
            model = tiny_model(**MODELS[name])
            runner = ModelRunner(model, 2, 64)
            first = runner.step({0: tokens(model, 20), 1: tokens(model, 5, 1)})
            second = runner.step({0: tokens(model, 4, 2), 1: tokens(model, 1, 3)}, pad_to=5)
        logits[backend] = [first[0], first[1], second[0], second[1]]
    for actual, expected in zip(logits["triton"], logits["naive"]):
        assert_close(actual, expected, 2e-5, name)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("name", ["qk-norm-window9", "split-k", "gemma2"])
def test_speculation_is_bitwise_identical(name: str) -> None:
    """Logits are identical one token at a time, when verifying drafts, and next to another request."""
    with forced("triton"):
        model = tiny_model(**MODELS[name])
        prompt, text, other = tokens(model, 12), tokens(model, 4, 1), tokens(model, 6, 2)
        runner = ModelRunner(model, 2, 64)
        runner.step({0: prompt})
        plain = torch.cat([runner.step({0: text[i : i + 1]})[0] for i in range(4)])
        runner = ModelRunner(model, 2, 64)
        runner.step({0: prompt})
        verified = runner.step({0: text}, keep=0)[0]
        runner.step({0: other[:3]}, keep=0)  # rejected drafts have no effect
        batched = runner.step({1: other, 0: text}, pad_to=6)[0]
    assert torch.equal(verified, plain)
    assert torch.equal(batched, plain)
