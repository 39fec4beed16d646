"""Rotation, per-head norm and cache write against `naive`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer import rope_cache
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

BLOCKS, BLOCK_SIZE, POSITIONS = 5, 16, 50


def make_rows(slots: list[int], positions: list[int]) -> Batch:
    i32, one = torch.int32, torch.zeros(1, dtype=torch.int32)
    return Batch(
        positions=torch.tensor(positions, dtype=i32),
        slots=torch.tensor(slots, dtype=i32),
        block_table=one[None],
        q_start=one,
        q_len=one + len(slots),
        base_len=one,
        max_q_len=len(slots),
        max_kv_len=len(slots),
    )


class Setup:
    def __init__(self, T: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype):
        self.qkv = (torch.randn(T, (heads + 2 * kv_heads) * head_dim) * 3).to(dtype)
        angles = torch.randn(POSITIONS, head_dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        self.cache = torch.randn(2, kv_heads, BLOCKS, BLOCK_SIZE, head_dim).to(dtype)
        self.norms = torch.randn(2, head_dim).to(dtype) if qk_norm else None

    def run(self, rows: Batch, dtype: torch.dtype, t: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """q and the cache afterwards, computed in `dtype`: by `naive` in float64, else by the kernel."""
        cache = self.cache.to(dtype, copy=True)
        q_norm, k_norm = (None, None) if self.norms is None else self.norms.to(dtype)
        qkv = self.qkv[t].to(dtype)
        with forced("naive" if dtype == torch.float64 else "triton"):
            q = rope_cache.rope_cache(qkv, self.cos_sin, cache[0], cache[1], rows, q_norm, k_norm, 1e-5)
        return q, cache


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float16, 1e-3), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "head_dim"),
    [(5, 9, 3, 64), (1, 1, 1, 80), (3, 4, 4, 96), (2, 7, 1, 256)],
    ids=lambda n: str(n),
)
def test_rope_cache(
    T: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype, tol: float
) -> None:
    setup = Setup(T, heads, kv_heads, head_dim, qk_norm, dtype)
    slots = [79, 0, 33, -1, 16][:T]
    rows = make_rows(slots, [49, 0, 7, 0, 21][:T])
    q, cache = setup.run(rows, dtype)
    expected_q, expected_cache = setup.run(rows, torch.float64)
    assert_close(q, expected_q, tol, "q")
    assert_close(cache, expected_cache, tol, "cache")
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[[slot for slot in slots if slot >= 0]] = False
    before, after = setup.cache.flatten(2, 3)[:, :, untouched], cache.flatten(2, 3)[:, :, untouched]
    assert torch.equal(before, after)  # a token without a slot writes nowhere


def test_bits_do_not_depend_on_other_tokens() -> None:
    setup = Setup(4, 3, 1, 64, True, torch.float32)
    slots, positions = [3, 17, -1, 40], [3, 9, 0, 30]
    q, cache = setup.run(make_rows(slots, positions), torch.float32)
    for t in range(4):
        one_q, one_cache = setup.run(
            make_rows(slots[t : t + 1], positions[t : t + 1]), torch.float32, slice(t, t + 1)
        )
        assert torch.equal(one_q[0], q[t])
        if slots[t] >= 0:
            flat, one_flat = cache.flatten(2, 3), one_cache.flatten(2, 3)
            assert torch.equal(one_flat[:, :, slots[t]], flat[:, :, slots[t]])


def test_bad_arguments_are_refused() -> None:
    setup = Setup(2, 3, 1, 64, False, torch.float32)
    rows = make_rows([0, 1], [0, 1])
    k, v = setup.cache
    with forced("triton"):
        for qkv, cos_sin, k_norm, message in (
            (setup.qkv[:, :-1], setup.cos_sin, None, "does not fit"),
            (setup.qkv.half(), setup.cos_sin, None, "float16"),
            (setup.qkv, setup.cos_sin.double(), None, "float32"),
            (setup.qkv, setup.cos_sin, torch.ones(64), "come together"),
        ):
            with pytest.raises(ValueError, match=message):
                rope_cache.rope_cache(qkv, cos_sin, k, v, rows, None, k_norm)
