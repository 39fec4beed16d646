"""Recycled tokens: the trees that grow from them, and what is kept of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from bench.cases import Built, Case
from bench.cases.speculation import VOCABS, make_batch, make_table, peaked_logits, proposed
from nanospec.kernels.speculation.grow import Marks, grow
from nanospec.kernels.speculation.learn import learn
from nanospec.kernels.speculation.recycled import ANY, CODES, ID_BITS, WIDTH, Recycled, place
from nanospec.kernels.speculation.verify import commit


def cases() -> Iterator[Case]:
    yield from grow_cases()
    yield from learn_cases()


def known(B: int, V: int, device: str) -> Recycled:
    """Every token has an entry, and no pair: eight tokens, each half as likely as the one before."""
    state = Recycled.empty(B, V, device)
    halves = torch.arange(1, WIDTH + 1, device=device) * 0.7 * CODES
    rows, tags = (column.to(device) for column in of_tokens(V))
    state.entries[rows] = torch.randint(0, V, (V, WIDTH), device=device).int() | halves.int() << ID_BITS
    state.tags[rows] = tags
    return state


@cache
def of_tokens(V: int) -> tuple[Tensor, Tensor]:
    """The rows [V] int64 and the tags [V] int32 of the entries of all tokens."""
    rows, tags = zip(*(place(ANY, token, 0) for token in range(V)), strict=True)
    return torch.tensor(rows), torch.tensor(tags, dtype=torch.int32)


def grow_cases() -> Iterator[Case]:
    for B, k, temperature in itertools.product((1, 8, 64), (4, 8, 16, 32, 63), (0.0, 1.0)):

        def build(device: str, B: int = B, k: int = k, temperature: float = temperature) -> Built:
            V = VOCABS["qwen"]
            table = make_table(B, V, device, num_tokens=1000, limit=k, temperature=temperature)
            rows, state = torch.arange(B, dtype=torch.int32, device=device), known(B, V, device)
            base = proposed(B, k, device)
            return Built(lambda: grow(base, state, table, rows, k))

        kind = "sampled" if temperature else "greedy"
        yield Case("grow", f"B{B}-K{k}-{kind}", build, bytes=B * k * (WIDTH + 2) * 4)


def learn_cases() -> Iterator[Case]:
    """Of steps with drafts and of plain ones."""
    for (model, V), (B, K) in itertools.product(VOCABS.items(), ((1, 0), (1, 8), (8, 8), (64, 4))):

        def build(device: str, V: int = V, B: int = B, K: int = K) -> Built:
            batch, table = make_batch(B, K + 1, device, tree=K > 0), make_table(B, V, device, num_tokens=4096)
            logits, state = peaked_logits(B * (K + 1), V, device), known(B, V, device)
            proposal = proposed(B, K, device)
            marks = Marks(proposal.drafts, proposal.drafts.float()) if K else None
            verdict = commit(batch.input_ids, batch, table, proposal)
            return Built(lambda: learn(state, logits, table, batch, proposal, marks, verdict))

        yield Case("learn", f"{model}-B{B}-K{K}", build, bytes=B * (K + 1) * V * 2)
