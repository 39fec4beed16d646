"""Paged attention: results match `naive`, and are bitwise independent of everything but the text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanospec.drafters.dflash import as_block
from nanospec.kernels.launch import GPUS, forced
from nanospec.kernels.layer import attention, split_kv
from tests.kernels.texts import Part, Texts, divide, random_trees, scored
from tests.util import assert_close, error_ratio

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32
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


def windowed(window: int, tree: int | None) -> Case:
    shape = [(231, 5), (window, 2), (max(window - 3, 0), 5), (0, 8)]
    return Case(shape, (3, 1, 64), window=window, tree=tree)


# Tiles of the cache are 64 positions long, spans 512. The windows of the last cases begin with a tile, with
# a block, and with the last entry of a tile.
CASES = {
    "gqa": Case([(70, 5), (0, 1), (61, 3)], (9, 3, 64)),
    "one-query-d80": Case([(100, 1)], (4, 4, 80), FP16, padded=False),
    "tile-boundaries": Case([(62, 2), (63, 1), (64, 1), (127, 2)], (2, 2, 96), FP16, 32),
    "empty-rows": Case([(5, 0), (130, 8), (9, 0)], (4, 2, 128), block_size=48, padded=False),
    "three-query-tiles": Case([(50, 17), (0, 9)], (4, 1, 64), FP16),
    "three-spans": Case([(1030, 3)], (1, 1, 64), block_size=64),
    "prompts": Case([(0, 30), (63, 70), (100, 1)], (1, 1, 80), padded=False),
    "prompts-window": Case([(64, 70), (10, 0), (1, 2)], (2, 1, 128), FP16, 32, padded=False, window=40),
    "cap": Case([(100, 5), (0, 1), (61, 3)], (3, 1, 64), FP16, window=90, softcap=0.5),
    "large-cap": Case([(90, 3)], (8, 1, 256), window=60, softcap=50.0, target="sm_86"),
    "sm_80-tree": Case([(70, 5), (31, 20)], (2, 1, 64), FP16, tree=3, target="sm_80"),
    "sm_100": Case([(70, 5), (31, 2)], (2, 1, 256), FP16, tree=3, target="sm_100"),
    "gfx942": Case([(70, 5), (31, 17)], (2, 1, 128), window=60, tree=3, target="gfx942"),
    "small-trees": Case([(40, 1), (0, 7), (5, 0), (126, 1)], (3, 1, 64), tree=2),
    "largest-trees": Case([(40, 64), (0, 9)], (2, 1, 64), tree=2),
    "window-8": windowed(8, tree=0),
    "window-41": windowed(41, tree=None),
    "window-104": windowed(104, tree=0),
}


def compare_with_naive(case: Case, tolerance: float, device: str | torch.device = "cpu") -> None:
    texts, parts = requests(case.shape, case.heads, case.block_size, case.dtype)
    trees = None if case.tree is None else random_trees([n for _, n in case.shape], case.tree)
    if case.window:  # blocks before the window are not read
        for r, base, n in parts:
            first = max(base - case.window + 1, 0) if n else base
            texts.block_table[r, : first // case.block_size] = 1 << 24
    uncapped = texts.expected(parts, case.window, padded=case.padded, trees=trees)
    texts.softcap = case.softcap
    want = texts.expected(parts, case.window, padded=case.padded, trees=trees)
    assert (error_ratio(uncapped, want) > 0.1) == (case.softcap == 0.5)
    out = texts.attend(parts, case.window, device, padded=case.padded, trees=trees)
    assert_close(out, want, max(tolerance, 1e-7 * (case.softcap or 0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_naive(name: str) -> None:
    with forced(gpu=GPUS[CASES[name].target]):
        compare_with_naive(CASES[name], {FP16: 1e-3, FP32: 1e-6}[CASES[name].dtype])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize(
    ("shape", "heads"), [([(70, 20), (0, 1), (505, 9)], (9, 1, 64)), ([(3, 63)], (4, 2, 80))]
)
def test_blocks_attend_to_the_whole_row(backend: Any, shape: Shape, heads: Heads) -> None:
    """Compare with dense attention, with more queries than a tile of columns and across spans."""
    texts, parts = requests(shape, heads)
    batch, q = texts.batch(parts)
    with forced(backend):
        out = scored(batch, attention.attention(q, texts.cache, as_block(batch), None, 0.1))
    for r, base, n in parts:
        j, size = torch.arange(base + n), texts.cache.shape[3]
        keys, values = texts.cache[:, :, texts.block_table[r, j // size].long(), j % size].double()
        keys, values = (part.repeat_interleave(heads[0] // heads[1], 0) for part in (keys, values))
        weights = (torch.einsum("qhd,hkd->hqk", texts.q[r, base : base + n].double(), keys) * 0.1).softmax(-1)
        assert_close(out[:n], torch.einsum("hqk,hkd->qhd", weights, values), 1e-6, f"row {r}")
        out = out[n:]


def check_independence(
    texts: Texts, first: int, window: int | None, monkeypatch: pytest.MonkeyPatch,
    device: str | torch.device = "cpu", cached_before: Sequence[int] = (28,),
) -> None:  # fmt: skip
    """Compare queries `first` to `first + 7` of the second text alone, in a batch, with K = 0, when verifying
    drafts, as a tree, and in prompt chunks with each number of earlier tokens in `cached_before`."""

    def attend(*parts: Part, **layout: object) -> Tensor:
        return texts.attend(parts, window, device, **layout)

    verified = attend((1, first, 8))
    for i in (0, 4, 7):
        assert torch.equal(attend((1, first + i, 1))[0], verified[i]), i
    assert torch.equal(attend((0, 61, 3), (1, first + 3, 5), (2, 0, 1))[3:8], verified[3:])
    assert torch.equal(attend((1, first, 8), trees=[[-1, *range(7)]]), verified)
    for division in (None, (1, 0), (9, 9)):
        if division is not None:
            divide(monkeypatch, *division)
        for n in cached_before:
            chunk = attend((2, 60, 9), (1, first - n, n + 8), padded=False)[9:]
            assert torch.equal(chunk[n:], verified), (division, n)


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(("first", "window"), [(508, None), (572, 130)])
def test_result_is_bitwise_independent_of_the_batch(
    first: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries cross the boundary of a span, or of a tile, with several tiles in each of two spans."""
    texts = Texts.random([70, first + 8, 75], (1, 1, 64), 16, FP32 if window else FP16)
    texts.softcap = 3.0 if window else None
    check_independence(texts, first, window, monkeypatch)


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


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_dot")
def test_tree_nodes_match_chains_bitwise() -> None:
    """Test a wide and a deep tree, next to a chain, at boundaries of a tile and a span."""
    shape, window = [(61, 7), (507, 10), (0, 6)], 460
    texts, parts = requests(shape, (1, 1, 64), dtype=FP16)
    texts.softcap = 3.0
    counts = [n for _, n in shape]
    deep = [i - 2 if i % 7 == 5 else i - 1 for i in range(counts[1])]
    trees = [random_trees(counts, 1)[0], deep, list(range(-1, counts[2] - 1))]
    out = texts.attend(parts, window, trees=trees)
    for b, (r, base, n) in enumerate(parts[:2]):
        path = [n - 1]
        while path[0]:
            path.insert(0, trees[b][path[0]])
        chain = path_as_chain(texts, parts[b], path).attend([(r, base, len(path))], window)
        assert torch.equal(out[sum(counts[:b]) :][path], chain), (b, path)


def test_split_kv_covers_the_cache_and_is_bounded() -> None:
    heads, target = (16, 8, 128), GPUS["sm_90"]
    for rows, q_len, length in product((1, 64, 600), (1, 9, 64), (1, 65, 5000, 32768)):
        split = split_kv.split_kv(rows, q_len, length, heads, target)
        spans, pairs = -(-length // 512), rows * split.query_tiles
        assert 1 <= split.programs <= max(spans, split.max_tiles, 1)
        assert split.programs * pairs <= max(32768 // split.columns, 256, pairs)
        assert split.programs == 1 or pairs < 264  # two programs per multiprocessor
        assert split.units == (max(spans, split.max_tiles) if split.programs > 1 else 0)
    assert split_kv.split_kv(1, 1, 1024, heads, target)[:5] == (16, 8, 16, 16, 16)  # a program for each tile
    assert split_kv.split_kv(32, 1, 32768, heads, target).programs == 8
    assert split_kv.split_kv(1, 64, 64, heads, target, tree=True).columns == 32
