"""Barring tokens against the plainest loop: for every vocabulary, mask and row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.native.build import library
from nanospec.kernels.sampling import mask

IMPLEMENTATIONS = {"naive": mask.naive, "kernel": mask.launch, "native": mask.native}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of(implementation: str, dtype: torch.dtype) -> None:
    if implementation == "native" and (library() is None or dtype == torch.float16):
        pytest.skip("no compiler, or no such dtype")


def masks(count: int, words: int, seed: int) -> torch.Tensor:
    """Sparse, dense, empty and full words among others."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count, words), generator=generator).int()
    kind = torch.randint(0, 4, (count, words), generator=generator)
    return torch.where(kind == 0, 0, torch.where(kind == 1, -1, bits)).int()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25)
@given(st.integers(1, 5000), st.integers(0, 3), st.integers(-2, 2), st.integers(0, 2), st.integers(0, 10**6))
def test_what_is_barred_is_barred_and_all_else_keeps_its_bits(
    implementation: str, V: int, T: int, more: int, kind: int, seed: int
) -> None:
    """Masks may have fewer bits than there are tokens, or more; rows need not lie back to back."""
    dtype = DTYPES[kind]
    if implementation == "native" and (library() is None or dtype == torch.float16):
        return
    words = max(-(-V // 32) + more, 1)
    allowed = masks(3, words + 2, seed)[:, :words]
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(-1, 3, (T,), generator=generator).int()
    logits = torch.randn(T, V + 7, generator=generator).to(dtype)[:, :V]
    wanted = logits.clone()
    for t, m in enumerate(at.tolist()):
        for i in range(V) if m >= 0 else ():
            word = int(allowed[m, i // 32]) if i // 32 < words else 0
            if not word >> (i % 32) & 1:
                wanted[t, i] = -math.inf
    IMPLEMENTATIONS[implementation](logits, allowed, at)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_logits_are_barred_too_and_kept_where_allowed(implementation: str, dtype: torch.dtype) -> None:
    of(implementation, dtype)
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, math.nan, 2.0]]).to(dtype)
    allowed, at = torch.tensor([[0b011010]]).int(), torch.tensor([0]).int()
    IMPLEMENTATIONS[implementation](logits, allowed, at)
    assert logits[0].isnan().tolist() == [False] * 4 + [True, False]
    assert logits[0, :4].tolist() == [-math.inf, math.inf, -math.inf, 1.0]
    assert logits[0, 5] == -math.inf
