"""The qkv product with RoPE and cache write: against `naive`, its bits, and what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer import product, tiling
from nanospec.kernels.layer.norm import Norm
from nanospec.kernels.layer.qkv_rope import qkv_rope
from nanospec.kernels.layer.rope_cache import Angles
from tests.kernels.products import stream_of
from tests.kernels.texts import tokens_at
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

BLOCKS, BLOCK_SIZE, POSITIONS = 11, 16, 50
TOLERANCE = {torch.float16: 1e-3, torch.float32: 2e-6}


class Setup:
    def __init__(
        self,
        T: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qk_norm: bool,
        dtype: torch.dtype,
        hidden: int = 200,
    ) -> None:
        generator = torch.Generator().manual_seed(T)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        width = (heads + 2 * kv_heads) * head_dim
        self.x, self.scale = normal(T, hidden), normal(hidden)
        self.weight, self.bias = normal(width, hidden) / 16, normal(width)
        angles = torch.randn(POSITIONS, head_dim // 2, generator=generator)
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        self.cache = normal(2, kv_heads, BLOCKS, BLOCK_SIZE, head_dim)
        self.norms = normal(2, head_dim) if qk_norm else None
        slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:T].int()
        slots[2::7] = -1
        positions = torch.randint(0, POSITIONS, (T,), generator=generator, dtype=torch.int32)
        self.slots, self.positions = slots, positions

    def run(
        self, dtype: torch.dtype, t: slice = slice(None), x: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q and the cache afterwards, computed in `dtype`: by `naive` in float64, else by the kernel."""
        batch = tokens_at(self.positions[t], self.slots[t])
        cache = self.cache.to(dtype, copy=True)
        norms = None
        if self.norms is not None:
            q_norm, k_norm = self.norms.to(dtype)
            norms = Norm(q_norm, 1e-5), Norm(k_norm, 1e-5)
        weights = self.weight.to(dtype), self.bias.to(dtype)
        with forced("naive" if dtype == torch.float64 else "triton"):
            stream = stream_of((self.x if x is None else x)[t].to(dtype), Norm(self.scale.to(dtype), 1e-6))
            return qkv_rope(
                stream, *weights, cache, batch, Angles(self.table, batch.positions, dtype), norms
            ), cache


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "head_dim"),
    [(5, 9, 3, 64), (70, 1, 1, 64), (3, 4, 4, 128), (2, 3, 1, 256), (4, 2, 1, 80)],
    ids=lambda n: str(n),
)
def test_qkv_rope(
    T: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype
) -> None:
    setup = Setup(T, heads, kv_heads, head_dim, qk_norm, dtype)
    q, cache = setup.run(dtype)
    expected_q, expected_cache = setup.run(torch.float64)
    assert_close(q, expected_q, TOLERANCE[dtype], "q")
    assert_close(cache, expected_cache, TOLERANCE[dtype], "cache")
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[setup.slots[setup.slots >= 0]] = False
    before, after = setup.cache.flatten(2, 3)[:, :, untouched], cache.flatten(2, 3)[:, :, untouched]
    assert torch.equal(before, after)  # a token without a slot writes nowhere


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_do_not_depend_on_other_tokens(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on their number nor on the tiling, but for the parts of the sum."""
    setup = Setup(130, 2, 1, head_dim, True, torch.float32)
    cut: dict[str, Any] = {"splits": 2, "part": 128, "apart": False}

    def run(t: slice, **fields: Any) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(product, "plan", lambda *a: tiling.plan(*a)._replace(**(cut | fields)))
        q, cache = setup.run(torch.float32, t)
        slots = setup.slots[t]
        return q, cache.flatten(2, 3)[:, :, slots[slots >= 0].long()]

    together = run(slice(None))
    for first, count in ((0, 1), (2, 3), (10, 17), (30, 65)):
        t = slice(first, first + count)
        written = slice(int((setup.slots[:first] >= 0).sum()), int((setup.slots[: first + count] >= 0).sum()))
        for fields in ({}, {"apart": True}, {"rows": 128, "width": 32}):
            q, kv = run(t, **fields)
            assert torch.equal(q, together[0][t]), (t, fields)
            assert torch.equal(kv, together[1][:, :, written]), (t, fields)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_in_keys_but_never_in_values(bad: float) -> None:
    setup = Setup(3, 2, 1, 64, False, torch.float32)
    setup.slots[:] = torch.tensor([5, 6, 7])
    x = setup.x.clone()
    x[1, 17] = bad
    (q, cache), (clean_q, clean) = setup.run(torch.float32, x=x), setup.run(torch.float32)
    keys, values = cache.flatten(2, 3)[:, 0, 5:8]
    assert q[1].isnan().all()
    assert keys[1].isnan().all()
    assert (values[1] == 0).all()
    others = [0, 2]
    assert torch.equal(q[others], clean_q[others])
    assert torch.equal(cache.flatten(2, 3)[:, 0, [5, 7]], clean.flatten(2, 3)[:, 0, [5, 7]])
