"""Per-head norm, RoPE and cache write: comparison with `naive`, bitwise independence, non-finite values."""

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import forced
from nanospec.kernels.layer.residual import Norm
from nanospec.kernels.layer.rope_cache import rope_cache
from tests.kernels.texts import tokens_at
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

BLOCKS, BLOCK_SIZE = 11, 16
TOLERANCE = {torch.float16: 1e-3, torch.float32: 2e-6}
Heads = tuple[int, int, int]  # Hq, Hkv, D


class Setup:
    """Random QKV of T tokens (a slice of a wider tensor), some without a slot, angles, norms and a cache."""

    def __init__(self, T: int, heads: Heads, qk_norm: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(T)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        num_heads, num_kv_heads, head_dim = heads
        self.qkv = normal(T, (num_heads + 2 * num_kv_heads + 1) * head_dim)[:, :-head_dim]
        self.qkv[1::5] *= 1e-2  # eps matters for small squares
        self.qkv[2::5] *= 1e-3
        angles = torch.randn(T, head_dim // 2, generator=generator)
        self.angles = torch.cat((angles.cos(), angles.sin()), 1)
        self.cache = normal(2, num_kv_heads, BLOCKS, BLOCK_SIZE, head_dim)
        self.norms = normal(2, head_dim) if qk_norm else None
        self.slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:T].int()
        self.slots[2::7] = -1

    def run(self, dtype: torch.dtype, t: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return q and the resulting cache by slot, computed by `naive` in float64, else by the kernel."""
        batch = tokens_at(torch.zeros_like(self.slots[t]), self.slots[t])
        cache, norms = self.cache.to(dtype, copy=True), None
        if self.norms is not None:
            q_norm, k_norm = self.norms.to(dtype)
            norms = Norm(q_norm, 1e-5), Norm(k_norm, 1e-5)
        with forced("naive" if dtype == torch.float64 else "triton"):
            q = rope_cache(self.qkv[t].to(dtype), cache, batch, self.angles[t], norms)
        return q, cache.flatten(2, 3)


@pytest.mark.parametrize(
    ("T", "heads", "qk_norm", "dtype"),
    [
        (5, (9, 3, 64), True, torch.float32),
        (1, (1, 1, 80), False, torch.float16),
        (3, (4, 4, 96), False, torch.float32),
        (2, (3, 1, 256), True, torch.float16),
    ],
    ids=str,
)
def test_matches_naive(T: int, heads: Heads, qk_norm: bool, dtype: torch.dtype) -> None:
    setup = Setup(T, heads, qk_norm, dtype)
    q, cache = setup.run(dtype)
    expected_q, expected_cache = setup.run(torch.float64)
    assert_close(q, expected_q, TOLERANCE[dtype], "q")
    assert_close(cache, expected_cache, TOLERANCE[dtype], "cache")
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[setup.slots[setup.slots >= 0].long()] = False
    before = setup.cache.flatten(2, 3)
    assert torch.equal(before[:, :, untouched], cache[:, :, untouched])  # tokens without a slot write nothing
    for i in range(T):  # bitwise independent of other tokens
        its_q, its_cache = setup.run(dtype, slice(i, i + 1))
        slots = setup.slots[i : i + 1].clamp(min=0).long()
        assert torch.equal(its_q[0], q[i])
        assert setup.slots[i] < 0 or torch.equal(its_cache[:, :, slots], cache[:, :, slots])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_stored_in_keys_only(bad: float) -> None:
    setup = Setup(3, (2, 1, 64), False, torch.float16)
    setup.slots[:] = torch.tensor([5, 6, 7])
    setup.qkv[0, 192:196] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1])  # values
    clean_q, clean = setup.run(torch.float16)
    assert clean[1, 0, 5, :4].tolist() == [0, 65504, -65504, 1]
    setup.qkv[1] = bad  # as after a norm of NaN or infinity
    q, cache = setup.run(torch.float16)
    assert not q[1].isfinite().any()
    assert not cache[0, 0, 6].isfinite().any()
    assert cache[1, 0, 6].isfinite().all()
    assert torch.equal(q[[0, 2]], clean_q[[0, 2]])
    assert torch.equal(cache[:, 0, [5, 7]], clean[:, 0, [5, 7]])
