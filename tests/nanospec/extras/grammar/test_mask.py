"""Masking logits, compared with a plain loop over random vocabularies, masks and rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.extras.grammar.extension import mask
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.native import library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = torch.tensor([math.nan, math.inf, -math.inf])  # kept bitwise where allowed


def masks(count: int, words: int, seed: int) -> torch.Tensor:
    """Return masks with random, empty and full words."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count, words), generator=generator).int()
    kind = torch.randint(0, 4, (count, words), generator=generator)
    return torch.where(kind == 0, 0, torch.where(kind == 1, -1, bits)).int()


@pytest.mark.parametrize("backend", ["naive", *["native"] * (library() is not None)])
@settings(max_examples=40)
@given(st.integers(1, 5000), st.integers(0, 3), st.integers(-2, 2), st.integers(0, 2), st.integers(0, 10**6))
def test_mask_matches_loop(backend: Backend, V: int, T: int, more: int, kind: int, seed: int) -> None:
    """Masks may have fewer or more bits than the vocabulary; rows need not be contiguous."""
    words = max(-(-V // 32) + more, 1)
    allowed = masks(3, words + 2, seed)[:, :words]
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(-1, 3, (T,), generator=generator).int()
    logits = torch.randn(T, V + 7, generator=generator).to(DTYPES[kind])[:, :V]
    logits[:, : len(ODD)] = ODD[:V]
    expected = logits.clone()
    for t, m in enumerate(at.tolist()):
        for i in range(V) if m >= 0 else ():
            word = int(allowed[m, i // 32]) if i // 32 < words else 0
            if not word >> (i % 32) & 1:
                expected[t, i] = -math.inf
    with forced(backend):
        mask(logits, allowed, at)
    assert torch.equal(logits.nan_to_num(7.5), expected.nan_to_num(7.5))
