"""Paged attention: comparison with `naive`, and bitwise independence of everything but the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import ARCHITECTURES, counters, forced
from nanospec.kernels.layer import attention, split_kv
from nanospec.kernels.layer.attention import AttentionMetadata
from tests.kernels.texts import SCALE, Texts, divide, random_trees, scored
from tests.util import assert_close, error_ratio

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 1e-6}
Shape = list[tuple[int, int]]  # (cached tokens, queries) of each row
Heads = tuple[int, int, int]  # Hq, Hkv, D


def requests(
    shape: Shape, heads: Heads, block_size: int = 16, dtype: torch.dtype = FP32
) -> tuple[Texts, list[tuple[int, int, int]]]:
    """Return texts of the given (cached tokens, queries), and a batch part for each."""
    texts = Texts.random([base + n for base, n in shape], heads, block_size, dtype)
    return texts, [(b, base, n) for b, (base, n) in enumerate(shape)]


# Tiles of the cache are 64 positions long, spans 512.
FEW: dict[str, tuple[Heads, int, Shape]] = {
    "B3-K4-H9-KV3-D64": ((9, 3, 64), 16, [(200, 5), (0, 1), (61, 3)]),
    "B1-K0-H4-KV4-D80": ((4, 4, 80), 16, [(100, 1)]),
    "B4-K1-H2-KV2-D96-boundaries": ((2, 2, 96), 32, [(62, 2), (63, 1), (64, 1), (127, 2)]),
    "B3-K7-H4-KV2-D128-empty-rows": ((4, 2, 128), 48, [(5, 0), (130, 8), (9, 0)]),
    "B1-K2-H8-KV1-D256": ((8, 1, 256), 16, [(90, 3)]),
    "B2-K16-H4-KV1-D64-three-query-tiles": ((4, 1, 64), 16, [(50, 17), (0, 9)]),
    "B1-K2-H1-KV1-D64-three-spans": ((1, 1, 64), 64, [(1100, 3)]),
}
PROMPTS: dict[str, tuple[Heads, int, Shape]] = {
    "B1-L65-H2-KV1-D64": ((2, 1, 64), 16, [(0, 65)]),
    "B3-L100-H3-KV3-D80-prefixes": ((3, 3, 80), 16, [(0, 30), (63, 100), (200, 1)]),
    "B3-L128-H4-KV1-D128-empty-row": ((4, 1, 128), 32, [(64, 128), (10, 0), (1, 2)]),
    "B1-L66-H2-KV2-D256": ((2, 2, 256), 16, [(31, 66)]),
}


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize(
    ("name", "padded", "window"),
    [(name, padded, None) for name in FEW for padded in (True, False)]
    + [(name, False, window) for name in PROMPTS for window in (None, 40)],
)
def test_chain(name: str, padded: bool, window: int | None, dtype: torch.dtype) -> None:
    heads, block_size, shape = (FEW | PROMPTS)[name]
    texts, parts = requests(shape, heads, block_size, dtype)
    out = texts.attend(parts, window, padded=padded)
    assert_close(out, texts.expected(parts, window, padded=padded), TOLERANCE[dtype], name)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("name", ["B3-K4-H9-KV3-D64", "B1-K2-H8-KV1-D256"])
def test_softcap(name: str, softcap: float, dtype: torch.dtype) -> None:
    heads, block_size, shape = FEW[name]
    texts, parts = requests(shape, heads, block_size, dtype)
    plain = texts.expected(parts, 90)
    texts.softcap = softcap
    wanted = texts.expected(parts, 90)
    assert (error_ratio(plain, wanted) > 0.1) == (softcap < 4)
    assert_close(texts.attend(parts, 90), wanted, max(TOLERANCE[dtype], 1e-7 * softcap), name)


@pytest.mark.parametrize(
    ("tree", "window", "shape"),
    [
        (tree, w, [(200, 5), (w, 2), (max(w - 3, 0), 5), (0, 8)])
        for tree in (0, 1)
        for w in (8, 63, 64, 65, 130)
    ]
    + [(2, None, [(40, nodes), (0, nodes // 2), (5, 0), (126, 1)]) for nodes in (1, 7, 33, 64)],
    ids=str,
)
def test_windows_and_trees(tree: int, window: int | None, shape: Shape) -> None:
    texts, parts = requests(shape, (3, 1, 64))
    trees = random_trees([n for _, n in shape], tree) if tree else None
    out = texts.attend(parts, window, trees=trees)
    assert_close(out, texts.expected(parts, window, trees=trees), TOLERANCE[FP32])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("begins", [192, 196, 208, 255])
def test_blocks_before_the_window_are_not_read(begins: int, tree: bool) -> None:
    """The window begins with a tile, inside a block, with a block, and with the last entry of a tile."""
    texts, parts = requests([(295, 5)], (2, 1, 64))
    window, trees = 295 - begins + 1, random_trees([5], 0) if tree else None
    want = texts.expected(parts, window, trees=trees)
    texts.cache = torch.nn.functional.pad(texts.cache, (0, 0, 0, 0, 1, 0), value=float("nan"))  # block 0
    texts.block_table += 1
    texts.block_table[0, : begins // 16] = 1 << 24  # would fault if read
    assert_close(texts.attend(parts, window, trees=trees), want, TOLERANCE[FP32])


@pytest.mark.parametrize(
    "target", [name for name in ARCHITECTURES if name != "sm_90"]
)  # covered by the other tests
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tilings_of_every_architecture(target: str, head_dim: int) -> None:
    shape = [(70, 5), (31, 20 if head_dim == 64 else 2)]
    texts, parts = requests(shape, (2, 1, head_dim))
    with forced(architecture=target):
        for trees in (None, random_trees([n for _, n in shape], 3)):
            out = texts.attend(parts, 60, trees=trees)
            assert_close(out, texts.expected(parts, 60, trees=trees), TOLERANCE[FP32], target)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (90, None), (90, 3.0)])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_result_is_bitwise_independent_of_the_batch(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """Alone, in a batch, with K = 0, when verifying drafts, as a tree, with few or many programs."""
    texts = Texts.random([70, 330, 75], (4, 2, 64), 16, dtype)
    texts.softcap = softcap
    verified = texts.attend([(1, 316, 8)], window)  # across a tile boundary
    for i in range(8):  # decoding token by token
        assert torch.equal(texts.attend([(1, 316 + i, 1)], window)[0], verified[i]), i
    batch = texts.attend([(0, 61, 3), (1, 319, 5), (2, 0, 1)], window)
    assert torch.equal(batch[3:8], verified[3:])
    packed = texts.attend([(2, 60, 2), (1, 318, 4)], window, padded=False)
    assert torch.equal(packed[2:], verified[2:6])
    many = texts.attend([(1, 306, 20)], window)  # several tiles of queries
    assert torch.equal(many[10:18], verified)
    stated = texts.attend([(1, 316, 8)], window, trees=[[-1, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(stated, verified)


def path_as_chain(texts: Texts, part: tuple[int, int, int], path: list[int]) -> Texts:
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
        ([(61, 7), (0, 6), (507, 10)], (4, 2, 64), FP32, None, None),  # next to tile and span boundaries
        ([(64, 5), (30, 64), (3, 0)], (3, 1, 64), FP32, None, 3.0),
        ([(63, 12), (126, 17), (200, 1)], (2, 1, 128), FP16, 20, None),
        ([(127, 3), (440, 18)], (4, 1, 64), FP32, 70, 3.0),
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
    """In wide and deep trees, next to a chain, with the default number of programs and with one."""
    texts, parts = requests(shape, heads, dtype=dtype)
    texts.softcap = softcap
    counts = [n for _, n in shape]
    wide = random_trees(counts, 1)
    deep = [[i - 2 if i % 7 == 5 else i - 1 for i in range(n)] for n in counts]
    for trees in (wide, [deep[0], list(range(-1, counts[1] - 1)), *deep[2:]]):
        out = texts.attend(parts, window, trees=trees)
        for b, (r, base, n) in enumerate(parts):
            for node in {n - 1, n // 2} - {-1, 0}:
                path = [node]
                while path[0]:
                    path.insert(0, trees[b][path[0]])
                chain = path_as_chain(texts, parts[b], path).attend([(r, base, len(path))], window)
                assert torch.equal(out[sum(counts[:b]) :][path], chain), (b, path)
    divide(monkeypatch, 1)
    assert torch.equal(texts.attend(parts, window, trees=trees), out)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("whole", [True, False], ids=["one-program", "many"])
def test_prompt_chunks_match_decoding_bitwise(
    whole: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a preempted request, which is first decoded, then recomputed in chunks of any size."""
    texts = Texts.random([20, 650], (4, 2, 64), 16, FP16)  # across a span boundary
    queries = (499, 511, 512, 585)
    decoded = [texts.attend([(1, i, 1)], window)[0] for i in queries]
    if whole:
        divide(monkeypatch, 1)
    for first, n in ((497, 100), (498, 5), (510, 64), (522, 64)):
        chunk = texts.attend([(0, 3, 9), (1, first, n)], window, padded=False)[9:]
        for i, alone in zip(queries, decoded, strict=True):
            if first <= i < first + n:
                assert torch.equal(chunk[i - first], alone), (first, n, i)


@pytest.mark.usefixtures("ordered_dot")
def test_result_is_bitwise_independent_of_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, parts = requests([(1297, 3), (700, 2), (5, 0), (30, 1)], (2, 1, 64))
    results = []
    for programs, max_tiles in ((21, 21), (2, 0), (3, 0), (7, 2), (1, 0)):
        divide(monkeypatch, programs, max_tiles)
        results.append(texts.attend(parts))
    assert all(torch.equal(result, results[0]) for result in results)
    assert not counters(torch.device("cpu"), "attention").any()  # reset to zero


def test_split_kv_covers_the_cache_and_is_bounded() -> None:
    for rows in (1, 3, 64, 600):
        for q_len in (1, 9, 64):
            for length in (1, 64, 65, 1024, 5000, 32768):
                split = split_kv.split_kv(rows, q_len, length, (16, 8, 128), "sm_90")
                spans, pairs = -(-length // 512), rows * split.query_tiles
                assert 1 <= split.programs <= max(spans, split.max_tiles, 1)
                assert split.programs * pairs <= max(32768 // split.columns, 256, pairs)
                assert split.units == (max(spans, split.max_tiles) if split.programs > 1 else 0)
    heads = (16, 8, 128)
    assert split_kv.split_kv(1, 1, 1024, heads, "sm_90")[:5] == (16, 8, 16, 16, 16)  # a program for each tile
    assert split_kv.split_kv(64, 1, 32768, heads, "sm_90").programs == 4


@pytest.mark.parametrize("window", [None, 70])
def test_nan_key_affects_attending_queries_only(window: int | None) -> None:
    """A non-finite value is stored as zeros with a key of NaN."""
    texts, parts = requests([(126, 5)], (2, 1, 64))
    want = texts.attend(parts, window)
    page, offset = texts.block_table[0, 128 // 16], 128 % 16
    texts.cache[0, :, page, offset], texts.cache[1, :, page, offset] = float("nan"), 0.0
    got = texts.attend(parts, window)
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
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "packed"])
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
def test_naive_matches_simplest_form(
    tree: bool, padded: bool, softcap: float | None, window: int | None
) -> None:
    """Nine rows: packed chains with one query are handled separately, padded chains are prompts."""
    last = (9, 40 if tree or not padded else 90)
    shape = [(30, 1), (5, 4), (0, 1), (47, 1), (12, 0), (33, 7), (16, 1), (15, 2), last]
    texts, parts = requests(shape, (6, 2, 32))
    cache, table = texts.cache.double().nan_to_num(), texts.block_table.clamp(min=0)
    texts = Texts(texts.q.double(), cache, table, softcap)
    trees = random_trees([n for _, n in shape], 1) if tree else None
    batch, q = texts.batch(parts, padded, trees)
    expected = plain(q, texts.cache, batch, window, softcap)
    actual = texts.expected(parts, window, padded=padded, trees=trees)
    assert_close(actual, scored(batch, expected), 1e-12)


@pytest.mark.parametrize("window", [None, 20])
def test_naive_with_mixed_query_counts(window: int | None) -> None:
    """Nine rows with no, one or several queries give the results of each row alone."""
    shape = [(30, 1), (5, 4), (0, 1), (47, 1), (12, 0), (33, 7), (16, 1), (15, 2), (64, 1)]
    texts, parts = requests(shape, (6, 2, 32))
    batch, q = texts.batch(parts, padded=False)
    assert len(AttentionMetadata(batch, window).parts(q, texts.cache)) == 2
    alone = [texts.expected([part], window) for part in parts if part[2]]
    assert_close(texts.expected(parts, window, padded=False), torch.cat(alone), 1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, FP32], ids=str)
def test_naive_avoids_small_products(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, softcap: float | None
) -> None:
    """With AVX-512, PyTorch sums up to 16^3 bf16 multiply-adds in another order than larger products, so one
    query of a narrow model would differ from several. Products must be larger, with the same result."""
    seen = []

    def spied(name: str) -> None:
        product = getattr(torch, name)

        def spy(*tensors: Tensor, **named: float) -> Tensor:
            a, b = tensors[-2:]
            seen.append(a.numel() * b.shape[2])
            return product(*tensors, **named)

        monkeypatch.setattr(torch, name, spy)

    texts, _ = requests([(7, 1)], (2, 1, 16))
    texts = replace(texts, q=texts.q.to(dtype), cache=texts.cache.nan_to_num().to(dtype), softcap=softcap)
    batch, q = texts.batch([(0, 7, 1)], padded=False)
    spied("bmm")
    spied("baddbmm")
    one = attention.naive(q, texts.cache, AttentionMetadata(batch), 0.25, softcap)
    assert len(seen) == 2
    assert all(size > 16**3 for size in seen)
    monkeypatch.setattr(attention, "MIN_MULTIPLY_ADDS", 0)
    assert_close(one, attention.naive(q, texts.cache, AttentionMetadata(batch), 0.25, softcap), 1e-2)
