"""A node of a tree has the bits of a chain of its path, in the forward pass in C++."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.native import build
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.models.decoder import Model
from tests.nanospec.models.test_compiled import build_model, tokens
from tests.tiny import Pages

pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no C++ compiler")

NAMES = ("gqa", "qk-norm-window9", "window300", "gemma2", "mqa-d80-biases", "group20-d256")
BASES = (0, 1, 14, 15, 16, 17, 31, 63, 64, 200, 239, 240, 241, 254, 255, 256, 257, 300, 511, 512)


@cache
def known(name: str) -> Model:
    return build_model(name)


def poisoned(model: Model, block_size: int) -> Pages:
    """Three rows; what no step has written is NaN as a key and the largest number as a value."""
    pages = Pages(model, 3, 640, block_size)
    pages.cache[:, :, :, 0] = torch.nan
    pages.cache[:, :, :, 1] = torch.finfo(torch.bfloat16).max
    return pages


def random_parents(rng: random.Random, k: int) -> list[int]:
    """Of nodes 1 .. k: deep, wide or between, or a chain."""
    near = rng.choice((1, 2, 5, 64))
    return [rng.randint(max(i - near, 0), i - 1) for i in range(1, k + 1)]


def paths_of(parents: list[int]) -> list[list[int]]:
    """From node 0 to each leaf."""
    paths = [[0]]
    for i, parent in enumerate(parents, 1):
        paths.append([*paths[parent], i])
    inner = set(parents)
    return [path for path in paths if path[-1] not in inner]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_a_node_has_the_bits_of_a_chain_of_its_path(name: str, seed: int) -> None:
    """Beside other trees, where tiles, pages and spans begin and end, on any number of threads."""
    model, rng = known(name), random.Random(seed)
    block_size, k = rng.choice((16, 64)), rng.choice((1, 4, 8, 30, 63))
    base = [rng.choice(BASES) for _ in range(3)]
    count = [rng.choice((k, k, rng.randint(0, k))) for _ in base]
    trees = [random_parents(rng, k) for _ in base]
    texts = [tokens(model, n + 1, seed + i) for i, n in enumerate(base)]
    drafts = tokens(model, 3 * k, seed + 9).view(3, k).int()
    pages, chains = poisoned(model, block_size), poisoned(model, block_size)
    for one in (pages, chains):
        if prompts := {row: text[:-1] for row, text in enumerate(texts) if len(text) > 1}:
            one.step(prompts)
    for row, text in enumerate(texts):
        pages.table.tokens[row, : len(text)] = text
        pages.table.num_tokens[row] = len(text)
    nothing = torch.zeros(3, dtype=torch.int32)
    parents = torch.tensor(trees, dtype=torch.int32)
    proposal = Proposal(drafts, torch.tensor(count, dtype=torch.int32), drafts, nothing, nothing, parents)
    batch = lay_out(pages.table, torch.arange(3, dtype=torch.int32), proposal, packed=rng.random() < 0.5)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(rng.randint(1, 3))
        logits = model.logits(model.forward(batch, pages.cache))
    finally:
        torch.set_num_threads(threads)
    for row, start in enumerate(batch.q_start.tolist()):
        paths = paths_of(trees[row][: count[row]])
        for path in rng.sample(paths, min(len(paths), 3)):
            ids = torch.cat((texts[row][-1:], drafts[row]))[path]
            alone = chains.step({row: ids}, keep=0)[row]
            assert torch.equal(logits[start:][path], alone), (row, base[row], path)
