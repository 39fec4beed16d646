"""Rotation, per-head norm and cache write against `naive`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer.norm import Norm
from nanospec.kernels.layer.rope_cache import Angles, rope_cache
from tests.kernels.texts import tokens_at
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

BLOCKS, BLOCK_SIZE, POSITIONS = 5, 16, 50


def batch_of(slots: list[int], positions: list[int]) -> Batch:
    return tokens_at(torch.tensor(positions, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32))


class Setup:
    def __init__(self, T: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype):
        sizes = torch.tensor([3.0, 1e-2, 1e-3, 3.0, 3.0])[:T, None]  # beside small squares eps counts
        self.qkv = (torch.randn(T, (heads + 2 * kv_heads) * head_dim) * sizes).to(dtype)
        angles = torch.randn(POSITIONS, head_dim // 2)
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        self.cache = torch.randn(2, kv_heads, BLOCKS, BLOCK_SIZE, head_dim).to(dtype)
        self.norms = torch.randn(2, head_dim).to(dtype) if qk_norm else None

    def run(self, batch: Batch, dtype: torch.dtype, t: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """q and the cache afterwards, computed in `dtype`: by `naive` in float64, else by the kernel."""
        cache = self.cache.to(dtype, copy=True)
        norms = None
        if self.norms is not None:
            q_norm, k_norm = self.norms.to(dtype)
            norms = Norm(q_norm, 1e-5), Norm(k_norm, 1e-5)
        angles = Angles(self.table, batch.positions, dtype)
        with forced("naive" if dtype == torch.float64 else "triton"):
            return rope_cache(self.qkv[t].to(dtype), cache, batch, angles, norms), cache


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
    batch = batch_of(slots, [49, 0, 7, 0, 21][:T])
    q, cache = setup.run(batch, dtype)
    expected_q, expected_cache = setup.run(batch, torch.float64)
    assert_close(q, expected_q, tol, "q")
    assert_close(cache, expected_cache, tol, "cache")
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[[slot for slot in slots if slot >= 0]] = False
    before, after = setup.cache.flatten(2, 3)[:, :, untouched], cache.flatten(2, 3)[:, :, untouched]
    assert torch.equal(before, after)  # a token without a slot writes nowhere


def test_bits_do_not_depend_on_other_tokens() -> None:
    setup = Setup(4, 3, 1, 64, True, torch.float32)
    slots, positions = [3, 17, -1, 40], [3, 9, 0, 30]
    q, cache = setup.run(batch_of(slots, positions), torch.float32)
    for t in range(4):
        one = slice(t, t + 1)
        one_q, one_cache = setup.run(batch_of(slots[one], positions[one]), torch.float32, one)
        assert torch.equal(one_q[0], q[t])
        if slots[t] >= 0:
            flat, one_flat = cache.flatten(2, 3), one_cache.flatten(2, 3)
            assert torch.equal(one_flat[:, :, slots[t]], flat[:, :, slots[t]])


def test_bad_arguments_are_refused() -> None:
    setup = Setup(2, 3, 1, 64, False, torch.float32)
    batch = batch_of([0, 1], [0, 1])
    norms = Norm(torch.ones(64), 1e-5), Norm(torch.ones(64), 1e-6)
    with forced("triton"):
        for qkv, table, chosen, message in (
            (setup.qkv[:, :-1], setup.table, None, "does not fit"),
            (setup.qkv, setup.table.double(), None, "float32"),
            (setup.qkv, setup.table, norms, "the same eps, not 1e-05 and 1e-06"),
        ):
            angles = Angles(table, batch.positions, torch.float32)
            with pytest.raises(ValueError, match=message):
                rope_cache(qkv, setup.cache, batch, angles, chosen)


def test_values_that_are_not_finite_do_not_get_to_the_cache() -> None:
    setup = Setup(1, 1, 1, 64, False, torch.float16)
    setup.qkv[0, 128:132] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1])
    _, cache = setup.run(batch_of([3], [0]), torch.float16)
    assert cache[1, 0, 0, 3, :4].tolist() == [0, 65504, -65504, 1]
