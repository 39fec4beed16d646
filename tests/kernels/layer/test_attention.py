"""Paged attention: comparison with `naive`, and bitwise independence of everything but the text."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import counters, forced
from nanospec.kernels.layer import attention, split_kv
from nanospec.kernels.layer.attention import AttentionMetadata
from tests.kernels.texts import SCALE, Part, Texts, divide, random_trees, scored
from tests.util import assert_close, error_ratio

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 1e-6}
Shape = list[tuple[int, int]]  # (cached tokens, queries) of each row
Heads = tuple[int, int, int]  # Hq, Hkv, D


def requests(
    shape: Shape, heads: Heads, block_size: int = 16, dtype: torch.dtype = FP32
) -> tuple[Texts, list[Part]]:
    """Return texts of the given (cached tokens, queries), and a batch part for each."""
    texts = Texts.random([base + n for base, n in shape], heads, block_size, dtype)
    return texts, [(b, base, n) for b, (base, n) in enumerate(shape)]


class Case(NamedTuple):
    shape: Shape
    heads: Heads
    dtype: torch.dtype = FP32
    block_size: int = 16
    padded: bool = True
    window: int | None = None
    softcap: float | None = None
    tree: int | None = None  # the seed of random trees
    target: str = "sm_90"


def around(window: int) -> Shape:
    return [(295, 5), (window, 2), (max(window - 3, 0), 5), (0, 8)]


# Tiles of the cache are 64 positions long, spans 512. The windows of the last rows begin with a tile, inside
# a block, with a block, and with the last entry of a tile.
CASES = {
    "gqa": Case([(200, 5), (0, 1), (61, 3)], (9, 3, 64)),
    "one-query-d80": Case([(100, 1)], (4, 4, 80), FP16, padded=False),
    "tile-boundaries": Case([(62, 2), (63, 1), (64, 1), (127, 2)], (2, 2, 96), FP16, 32),
    "empty-rows": Case([(5, 0), (130, 8), (9, 0)], (4, 2, 128), block_size=48, padded=False),
    "three-query-tiles": Case([(50, 17), (0, 9)], (4, 1, 64), FP16),
    "three-spans": Case([(1100, 3)], (1, 1, 64), block_size=64),
    "prompts": Case([(0, 30), (63, 70), (200, 1)], (1, 1, 80), padded=False),
    "prompts-window": Case([(64, 80), (10, 0), (1, 2)], (2, 1, 128), FP16, 32, padded=False, window=40),
    "cap": Case([(200, 5), (0, 1), (61, 3)], (3, 1, 64), FP16, window=90, softcap=0.5),
    "large-cap": Case([(90, 3)], (8, 1, 256), softcap=50.0),
    "sm_80": Case([(70, 5), (31, 2)], (2, 1, 256), window=60, target="sm_80"),
    "sm_80-tree": Case([(70, 5), (31, 20)], (2, 1, 64), FP16, tree=3, target="sm_80"),
    "sm_100": Case([(70, 5), (31, 2)], (2, 1, 256), FP16, tree=3, target="sm_100"),
    "gfx942": Case([(70, 5), (31, 17)], (2, 1, 128), window=60, tree=3, target="gfx942"),
    "small-trees": Case([(40, 1), (0, 7), (5, 0), (126, 1)], (3, 1, 64), tree=2),
    "largest-trees": Case([(40, 64), (0, 9)], (2, 1, 64), tree=2),
    **{
        f"window-{window}": Case(around(window), (3, 1, 64), window=window, tree=tree)
        for window, tree in ((8, 0), (41, None), (64, 1), (65, None), (88, 1), (100, None), (104, 0))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_naive(name: str) -> None:
    case = CASES[name]
    texts, parts = requests(case.shape, case.heads, case.block_size, case.dtype)
    trees = None if case.tree is None else random_trees([n for _, n in case.shape], case.tree)
    uncapped = texts.expected(parts, case.window, padded=case.padded, trees=trees)
    texts.softcap = case.softcap
    want = texts.expected(parts, case.window, padded=case.padded, trees=trees)
    assert (error_ratio(uncapped, want) > 0.1) == (case.softcap == 0.5)
    if case.window:  # blocks before the window are not read
        for r, base, n in parts:
            first = max(base - case.window + 1, 0) if n else base
            texts.block_table[r, : first // case.block_size] = 1 << 24
    with forced(architecture=case.target):
        out = texts.attend(parts, case.window, padded=case.padded, trees=trees)
    assert_close(out, want, max(TOLERANCE[case.dtype], 1e-7 * (case.softcap or 0)), name)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(
    ("first", "dtype", "window", "softcap"), [(124, FP32, None, None), (508, FP16, 130, 3.0)]
)
def test_result_is_bitwise_independent_of_the_batch(
    first: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, in a batch, with K = 0, when verifying drafts, in a prompt chunk, as a tree; with any number of
    programs. The queries cross the boundary of a tile or a span."""
    texts = Texts.random([70, 530, 75], (2, 1, 64), 16, dtype)
    texts.softcap = softcap
    verified = texts.attend([(1, first, 8)], window)
    for i in (0, 4, 7):
        assert torch.equal(texts.attend([(1, first + i, 1)], window)[0], verified[i]), i
    batch = texts.attend([(0, 61, 3), (1, first + 3, 5), (2, 0, 1)], window)
    assert torch.equal(batch[3:8], verified[3:])
    stated = texts.attend([(1, first, 8)], window, trees=[[-1, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(stated, verified)
    for division in (None, (1, 0), (2, 0)):
        if division is not None:
            divide(monkeypatch, *division)
        chunk = texts.attend([(2, 60, 9), (1, first - 28, 36)], window, padded=False)[9:]
        assert torch.equal(chunk[28:], verified), division
    assert not counters(torch.device("cpu"), "attention").any()  # reset to zero


def path_as_chain(texts: Texts, part: Part, path: list[int]) -> Texts:
    """Return texts in which a path's queries directly follow the part's cached tokens, followed by NaN."""
    r, base, n = part
    actual = replace(texts, q=texts.q.clone(), cache=texts.cache.clone())
    j = base + torch.arange(n)
    page, offset, to = texts.block_table[r, j // 16].long(), j % 16, slice(len(path))
    actual.cache[:, :, page, offset] = float("nan")
    actual.cache[:, :, page[to], offset[to]] = texts.cache[:, :, page[path], offset[path]]
    actual.q[r, j[to]] = texts.q[r, j[path]]
    return actual


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(
    ("shape", "heads", "dtype", "window", "softcap"),
    [
        ([(61, 7), (507, 10), (0, 6)], (2, 1, 64), FP32, None, None),  # next to tile and span boundaries
        ([(63, 9), (126, 8), (3, 0)], (2, 1, 128), FP16, 20, 3.0),
    ],
)
def test_tree_nodes_match_chains_bitwise(
    shape: Shape,
    heads: Heads,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a wide and a deep tree, next to a chain, with the default number of programs and with one."""
    texts, parts = requests(shape, heads, dtype=dtype)
    texts.softcap = softcap
    counts = [n for _, n in shape]
    deep = [i - 2 if i % 7 == 5 else i - 1 for i in range(counts[1])]
    trees = [random_trees(counts, 1)[0], deep, list(range(-1, counts[2] - 1))]
    out = texts.attend(parts, window, trees=trees)
    for b, (r, base, n) in enumerate(parts[:2]):
        for node in (n // 2, n - 1):
            path = [node]
            while path[0]:
                path.insert(0, trees[b][path[0]])
            chain = path_as_chain(texts, parts[b], path).attend([(r, base, len(path))], window)
            assert torch.equal(out[sum(counts[:b]) :][path], chain), (b, path)
    divide(monkeypatch, 1)
    assert torch.equal(texts.attend(parts, window, trees=trees), out)


def test_split_kv_covers_the_cache_and_is_bounded() -> None:
    heads = (16, 8, 128)
    for rows in (1, 3, 64, 600):
        for q_len in (1, 9, 64):
            for length in (1, 64, 65, 1024, 5000, 32768):
                split = split_kv.split_kv(rows, q_len, length, heads, "sm_90")
                spans, pairs = -(-length // 512), rows * split.query_tiles
                assert 1 <= split.programs <= max(spans, split.max_tiles, 1)
                assert split.programs * pairs <= max(32768 // split.columns, 256, pairs)
                assert split.units == (max(spans, split.max_tiles) if split.programs > 1 else 0)
    assert split_kv.split_kv(1, 1, 1024, heads, "sm_90")[:5] == (16, 8, 16, 16, 16)  # a program for each tile
    assert split_kv.split_kv(64, 1, 32768, heads, "sm_90").programs == 4
    assert split_kv.split_kv(1, 64, 64, heads, "sm_90", tree=True).columns == 32
    for config in [config for by_dim in split_kv.CONFIGS.values() for config in by_dim.values()]:
        assert all(n.bit_count() == 1 for n in config[:3])  # powers of two


def test_nan_key_affects_attending_queries_only() -> None:
    """A non-finite value is stored as zeros with a key of NaN."""
    texts, parts = requests([(126, 5)], (2, 1, 64))
    want = texts.attend(parts, 70)
    page, offset = texts.block_table[0, 128 // 16], 128 % 16
    texts.cache[0, :, page, offset], texts.cache[1, :, page, offset] = float("nan"), 0.0
    got = texts.attend(parts, 70)
    assert torch.equal(got[:2], want[:2])
    assert got[2:].isnan().all()


def plain(q: Tensor, cache: Tensor, batch: Batch, window: int | None, softcap: float | None) -> Tensor:
    """Compute attention in its simplest form, query by query and head by head; 0 for padding."""
    out, block_size, group = torch.zeros_like(q), cache.shape[3], q.shape[1] // cache.shape[1]
    rows = torch.stack([batch.base_len, batch.q_start, batch.q_len], 1).tolist()
    for table, (base, start, n) in zip(batch.block_table, rows, strict=True):
        position = [*range(base), *batch.positions[start : start + n].tolist()]  # of each cache entry
        for i in range(n):
            ancestors = (1 << (i + 1)) - 1 if batch.ancestors is None else int(batch.ancestors[start + i])
            seen = [j for j in range(base + n) if j < base or ancestors >> (j - base) & 1]
            seen = [j for j in seen if window is None or position[j] > position[base + i] - window]
            pages, offsets = table[[j // block_size for j in seen]], [j % block_size for j in seen]
            for head in range(q.shape[1]):
                k, v = cache[:, head // group, pages, offsets]  # [len(seen), D]
                scores = k @ q[start + i, head] * SCALE
                scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                out[start + i, head] = scores.softmax(0) @ v
    return out


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("layout", ["padded", "packed", "prompts", "tree", "packed-tree"])
def test_naive_matches_simplest_form(layout: str, softcap: float | None, window: int | None) -> None:
    """Nine rows: packed chains with one query are computed separately, long padded chains are prompts."""
    last = (9, 150 if layout == "prompts" else 40)
    shape = [(30, 1), (5, 4), (0, 1), (47, 1), (12, 0), (33, 7), (16, 1), (15, 2), last]
    texts, parts = requests(shape, (6, 2, 32))
    cache, table = texts.cache.double().nan_to_num(), texts.block_table.clamp(min=0)
    texts = Texts(texts.q.double(), cache, table, softcap)
    trees = random_trees([n for _, n in shape], 1) if "tree" in layout else None
    padded = not layout.startswith("packed")
    batch, q = texts.batch(parts, padded, trees)
    expected = plain(q, texts.cache, batch, window, softcap)
    actual = texts.expected(parts, window, padded=padded, trees=trees)
    assert_close(actual, scored(batch, expected), 1e-12)
    count = {"packed": 2, "prompts": 9}.get(layout, 1)  # an empty row has no part, and the last one has two
    assert len(AttentionMetadata(batch, window).parts(q, texts.cache)) == count


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=str)
def test_naive_avoids_small_products(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, softcap: float | None
) -> None:
    """With AVX-512, PyTorch sums up to 16^3 bf16 multiply-adds in another order than larger products, so one
    query of a narrow model would differ from several. Products must be larger, with the same result."""
    sizes: list[int] = []

    def spy_on(name: str) -> None:
        product = getattr(torch, name)

        def spy(*tensors: Tensor, **named: float) -> Tensor:
            sizes.append(tensors[-2].numel() * tensors[-1].shape[2])
            return product(*tensors, **named)

        monkeypatch.setattr(torch, name, spy)

    texts, parts = requests([(7, 1)], (2, 1, 16))
    batch, q = texts.batch(parts, padded=False)
    q, cache, metadata = q.to(dtype), texts.cache.nan_to_num().to(dtype), AttentionMetadata(batch)
    spy_on("bmm")
    spy_on("baddbmm")
    one = attention.naive(q, cache, metadata, 0.25, softcap)
    assert len(sizes) == 2
    assert min(sizes) > 16**3
    monkeypatch.setattr(attention, "MIN_MULTIPLY_ADDS", 0)
    assert_close(one, attention.naive(q, cache, metadata, 0.25, softcap), 1e-2)
