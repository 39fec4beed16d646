"""Attention of long chains: whole prompts, chunks after a cached prefix, sliding windows."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer.attention import attention
from tests.kernels.texts import Texts
from tests.util import assert_close

from .test_attention import FP16, FP32, TOLERANCE, expected, run

pytestmark = pytest.mark.usefixtures("poison")

CASES = {
    "B1-L65-H2-KV1-D64": (2, 1, 64, 16, [(0, 65)]),
    "B3-L100-H3-KV3-D80-prefixes": (3, 3, 80, 16, [(0, 30), (63, 100), (200, 1)]),
    "B3-L128-H4-KV1-D128-empty-row": (4, 1, 128, 32, [(64, 128), (10, 0), (1, 2)]),
    "B1-L66-H2-KV2-D256": (2, 2, 256, 16, [(31, 66)]),
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_prefill(name: str, dtype: torch.dtype, window: int | None) -> None:
    heads, kv_heads, head_dim, block_size, shape = CASES[name]
    texts = Texts.random([base + n for base, n in shape], heads, kv_heads, head_dim, block_size, dtype)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    out = run(texts, parts, window, padded=False)
    assert_close(out, expected(texts, parts, window, padded=False), TOLERANCE[dtype], name)


def test_trees_are_refused() -> None:
    texts = Texts.random([70], 1, 1, 64, 16, FP32)
    rows, q = texts.rows([(0, 0, 65)])
    rows.ancestors = torch.ones(65, dtype=torch.int64)
    with forced("triton"), pytest.raises(ValueError, match="for chains"):
        attention(q, texts.k_cache, texts.v_cache, rows, 0.1)
