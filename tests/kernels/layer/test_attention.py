"""Paged attention of few queries: against `naive`, and that bits depend on the text alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer import attention, split_kv
from tests.kernels.texts import Texts, scored
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 1e-6}


def run(texts: Texts, parts: list, window: int | None = None, **layout: object) -> Tensor:
    rows, q = texts.rows(parts, **layout)  # type: ignore[arg-type]
    with forced("triton"):
        out = attention.attention(q, texts.k_cache, texts.v_cache, rows, 0.1, window)
    return scored(rows, out)


def expected(texts: Texts, parts: list, window: int | None = None, **layout: object) -> Tensor:
    texts = texts.clean()
    rows, q = texts.rows(parts, **layout)  # type: ignore[arg-type]
    return scored(rows, attention.naive(q.nan_to_num(), texts.k_cache, texts.v_cache, rows, 0.1, window))


def random_tree(rng: random.Random, n: int) -> list[int]:
    return [-1] + [rng.randrange(i) for i in range(1, n)] if n else []


# (cached tokens, queries) of each row; KV tiles are 64 long, spans 512 or 1024.
CASES = {
    "B3-K4-H9-KV3-D64": (9, 3, 64, 16, [(200, 5), (0, 1), (61, 3)]),
    "B1-K0-H4-KV4-D80": (4, 4, 80, 16, [(100, 1)]),
    "B4-K1-H2-KV2-D96-boundaries": (2, 2, 96, 32, [(62, 2), (63, 1), (64, 1), (127, 2)]),
    "B3-K7-H4-KV2-D128-empty-rows": (4, 2, 128, 48, [(5, 0), (130, 8), (9, 0)]),
    "B1-K2-H8-KV1-D256": (8, 1, 256, 16, [(90, 3)]),
    "B2-K16-H4-KV1-D64-three-query-tiles": (4, 1, 64, 16, [(50, 17), (0, 9)]),
    "B1-K2-H1-KV1-D64-three-spans": (1, 1, 64, 64, [(1100, 3)]),
}


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_chain(name: str, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, block_size, shape = CASES[name]
    texts = Texts.random([base + n for base, n in shape], heads, kv_heads, head_dim, block_size, dtype)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    for padded in (True, False):
        layout = {"padded": padded}
        out = run(texts, parts, **layout)
        assert_close(out, expected(texts, parts, **layout), TOLERANCE[dtype], name)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [8, 63, 64, 65, 130])
def test_window(window: int, tree: bool) -> None:
    rng = random.Random(window)
    shape = [(200, 5), (window, 2), (max(window - 3, 0), 5), (0, 8)]
    texts = Texts.random([base + n for base, n in shape], 2, 1, 64, 16, FP32)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    trees = [random_tree(rng, n) for _, n in shape] if tree else None
    out = run(texts, parts, window, trees=trees)
    assert_close(out, expected(texts, parts, window, trees=trees), TOLERANCE[FP32])


def test_pages_before_the_window_may_be_gone() -> None:
    texts = Texts.random([300], 2, 1, 64, 16, FP32)
    parts = [(0, 295, 5)]
    want = expected(texts, parts, 100)
    texts.block_table[0, : (295 - 100 + 1) // 16] = 1 << 30  # would fault if it were read
    assert_close(run(texts, parts, 100), want, TOLERANCE[FP32])


@pytest.mark.parametrize("nodes", [1, 7, 33, 64])
def test_tree(nodes: int) -> None:
    rng = random.Random(nodes)
    shape = [(40, nodes), (0, nodes // 2), (5, 0), (126, 1)]
    texts = Texts.random([base + n for base, n in shape], 3, 1, 64, 16, FP32)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    trees = [random_tree(rng, n) for _, n in shape]
    out = run(texts, parts, trees=trees)
    assert_close(out, expected(texts, parts, trees=trees), TOLERANCE[FP32])


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_bits_depend_on_the_text_alone(dtype: torch.dtype, window: int | None) -> None:
    """Alone, in a batch, with K = 0, as a row of a verification, as a tree, on few or many programs."""
    texts = Texts.random([70, 330, 75], 4, 2, 64, 16, dtype)
    verified = run(texts, [(1, 316, 8)], window)  # across the border of two tiles
    for i in range(8):  # plain decoding, token by token
        assert torch.equal(run(texts, [(1, 316 + i, 1)], window)[0], verified[i]), i
    batch = run(texts, [(0, 61, 3), (1, 319, 5), (2, 0, 1)], window)
    assert torch.equal(batch[3:8], verified[3:])
    packed = run(texts, [(2, 60, 2), (1, 318, 4)], window, padded=False)
    assert torch.equal(packed[2:], verified[2:6])
    many = run(texts, [(1, 306, 20)], window)  # several tiles of queries
    assert torch.equal(many[10:18], verified)
    stated = run(texts, [(1, 316, 8)], window, trees=[[-1, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(stated, verified)


@pytest.mark.usefixtures("ordered_dot")
def test_tiles_and_spans_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts.random([1300], 2, 1, 64, 16, FP32)
    tiles = run(texts, [(0, 1297, 3)])
    monkeypatch.setattr(split_kv, "PROGRAMS", 1)  # one program takes span after span
    assert torch.equal(run(texts, [(0, 1297, 3)]), tiles)
    monkeypatch.setattr(split_kv, "PROGRAMS", 2)
    assert torch.equal(run(texts, [(0, 1297, 3)]), tiles)


def test_bad_arguments_are_refused() -> None:
    texts = Texts.random([20], 2, 1, 64, 16, FP32)
    rows, q = texts.rows([(0, 15, 5)])
    with forced("triton"):
        for bad, message in (
            ((q.half(), texts.k_cache, texts.v_cache), "float16"),
            ((q[..., :32].contiguous(), texts.k_cache, texts.v_cache), "does not fit"),
            ((q, texts.k_cache[..., :32], texts.v_cache[..., :32]), "one after another"),
            ((q, texts.k_cache, texts.v_cache.half()), "same dtype"),
        ):
            with pytest.raises(ValueError, match=message):
                attention.attention(*bad, rows, 0.1)


@pytest.mark.parametrize("window", [None, 20])
def test_naive_treats_rows_with_and_without_drafts_apart(window: int | None) -> None:
    """Nine rows, some with one query, some with several, one with none: as each row by itself."""
    torch.manual_seed(0)
    q_len = torch.tensor([1, 4, 1, 1, 0, 7, 1, 2, 1], dtype=torch.int32)
    base_len = torch.tensor([30, 5, 0, 47, 12, 33, 16, 15, 64], dtype=torch.int32)
    k_cache, v_cache = torch.randn(2, 2, 60, 16, 32)
    table = torch.randperm(60)[:54].view(9, 6).int()
    q = torch.randn(int(q_len.sum()), 6, 32)

    def batch(chosen: list[int]) -> Batch:
        lengths, bases = q_len[chosen], base_len[chosen]
        positions = torch.cat([b + torch.arange(n) for b, n in zip(bases, lengths, strict=True)]).int()
        start = (lengths.cumsum(0) - lengths).int()
        longest, reach = int(lengths.max()), int((bases + lengths).max())
        return Batch(positions, positions, table[chosen], start, lengths, bases, longest, reach)

    together = attention.naive(q, k_cache, v_cache, batch(list(range(9))), 0.2, window)
    assert len(attention._parts(batch(list(range(9))))) == 2
    parts = torch.split(q, q_len.tolist())
    alone = [
        attention.naive(part, k_cache, v_cache, batch([b]), 0.2, window)
        for b, part in enumerate(parts)
        if len(part)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
