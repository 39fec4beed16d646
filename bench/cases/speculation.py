"""The kernels of speculative decoding: propose, sample, accept, commit, and the layout of a batch."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.cases import Built, Case
from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import use_triton
from nanospec.kernels.sampling import noise, sample, typical
from nanospec.kernels.speculation import ngram
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.trim import Estimates, trim
from nanospec.kernels.speculation.verify import commit
from nanospec.kernels.table import Table

VOCABS = {"smollm2": 49152, "llama3": 128256, "qwen": 151936}
BATCHES = ((1, 0), (1, 4), (8, 4), (64, 4))  # (B, K)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k-top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "penalties": {"penalized": True, "repetition": 1.1, "temperature": 1.0},
}
RECORDED = (  # mean logits of ranks 1, 2, 4, ..., 32768 and the last, by SmolLM2-135M-Instruct for 224 tokens
    24.8, 23.8, 23.0, 22.1, 21.2, 20.2, 19.2, 18.3, 17.3, 16.3, 15.2, 14.0, 12.7, 11.2, 9.4, 6.8, -8.1
)  # fmt: skip


def cases() -> Iterator[Case]:
    for part in (
        ngram_cases, ngram_tree_cases, sample_cases, sample_tree_cases, typical_cases, typical_tree_cases,
        verify_cases, trim_cases, layout_cases, noise_cases,
    ):  # fmt: skip
        yield from part()


def make_batch(B: int, Q: int, device: str, tree: bool = False) -> Batch:
    """Return a batch of B rows with Q tokens each, at position 1000."""
    rows = torch.arange(B, dtype=torch.int32, device=device)
    place = torch.arange(B * Q, dtype=torch.int32, device=device) % Q
    return Batch(
        rows=rows, input_ids=torch.zeros_like(place), positions=place + 1000, slots=torch.zeros_like(place),
        block_table=torch.zeros_like(rows)[:, None], q_start=rows * Q, q_len=torch.full_like(rows, Q),
        base_len=torch.full_like(rows, 1000), max_q_len=Q, max_kv_len=1000 + Q,
        ancestors=torch.full((B * Q,), -1, dtype=torch.int64, device=device) if tree else None,
        parents=((place - 1) // 2).clamp(min=0) if tree else None,
    )  # fmt: skip


def make_table(B: int, V: int, device: str, context: int = 4096, **columns: float) -> Table:
    """Return a table of B request rows with neutral sampling parameters, except for the given columns."""
    table = Table.empty(B, context, 16, V, device)
    neutral = {"top_p": 1, "repetition": 1, "seed": 7, "stop_ids": -1, "max_len": context, "min_n": 1}
    for name, value in {**neutral, **columns}.items():
        getattr(table, name).fill_(value)
    return table


def peaked_logits(T: int, V: int, device: str) -> Tensor:
    """Return logits like those of a language model: few tokens have most of the probability."""
    return (torch.randn(T, V, device=device) * 2.5 + 8 * torch.rand(T, V, device=device) ** 24).bfloat16()


def recorded_logits(T: int, V: int, device: str) -> Tensor:
    """Return `RECORDED`, interpolated over the logarithm of the rank, at random token ids."""
    rank, mean = torch.rand(T, V, device=device).argsort(-1), torch.tensor(RECORDED, device=device)
    x = (rank + 1).log2()
    i = x.long().clamp(max=len(RECORDED) - 2)
    share = (x - i) / torch.where(i < len(RECORDED) - 2, 1.0, math.log2(V) - i)
    return torch.lerp(mean[i], mean[i + 1], share).bfloat16()


def ngram_cases() -> Iterator[Case]:
    for B, length, max_n in itertools.product((1, 8, 64, 256), (1024, 4096, 32768), (3, 8)):  # default: 8

        def build(device: str, B: int = B, length: int = length, max_n: int = max_n) -> Built:
            table = make_table(B, 1, device, 40960, num_tokens=length, max_n=max_n, max_k=8)
            table.tokens.random_(0, 2000)
            rows = torch.arange(B, dtype=torch.int32, device=device)
            return Built(lambda: ngram.propose(table, rows, 5, max_n))

        yield Case("ngram", f"B{B}-L{length}-n{max_n}", build, bytes=B * length * 4)


def ngram_tree_cases() -> Iterator[Case]:
    """Yield cases with texts of two distinct tokens, so that every round finds hundreds of matches."""
    for B, length, width, k in itertools.product((1, 8, 64), (1024, 4096), (2, 4), (8, 16, 63)):

        def build(device: str, B: int = B, length: int = length, width: int = width, k: int = k) -> Built:
            table = make_table(B, 1, device, 40960, num_tokens=length, max_n=3, max_k=k, tree_width=width)
            table.tokens.random_(0, 2)
            rows = torch.arange(B, dtype=torch.int32, device=device)
            return Built(lambda: ngram.propose(table, rows, k, 3, width))

        yield Case("ngram_tree", f"B{B}-L{length}-w{width}-K{k}", build, bytes=B * length * 4)


def every_target(operation: Any, logits: Tensor) -> Any:
    """Return the implementation of `sample` or `typical` that does not skip targets that are not read."""
    return operation.launch if use_triton(logits) else operation.naive


def sample_cases() -> Iterator[Case]:
    kinds = [*REQUESTS, "top_p-recorded", "top_k-top_p-recorded"]
    for (model, V), (B, K), kind in itertools.product(VOCABS.items(), BATCHES, kinds):

        def build(device: str, V: int = V, B: int = B, Q: int = K + 1, kind: str = kind) -> Built:
            make = recorded_logits if "recorded" in kind else peaked_logits
            logits, values = make(B * Q, V, device), REQUESTS[kind.removesuffix("-recorded")]
            table, batch = make_table(B, V, device, **values), make_batch(B, Q, device)
            return Built(lambda: every_target(sample, logits)(logits, table, batch))

        penalties = 9 * V * B if kind == "penalties" else 0  # bias, counts, in_prompt
        size = B * (K + 1) * V * 2 + penalties
        yield Case("sample", f"{model}-B{B}-K{K}-{kind}", build, bytes=size)


def sample_tree_cases() -> Iterator[Case]:
    """Yield a tree with penalties. These count only a query's ancestors, which is a separate kernel."""

    def build(device: str) -> Built:
        B, Q, V = 8, 8, VOCABS["smollm2"]
        table, batch = make_table(B, V, device, **REQUESTS["penalties"]), make_batch(B, Q, device, tree=True)
        logits = peaked_logits(B * Q, V, device)
        return Built(lambda: every_target(sample, logits)(logits, table, batch))

    yield Case("sample", "smollm2-B8-K7-tree", build, bytes=64 * 49152 * 2 + 9 * 49152 * 8)


def typical_cases() -> Iterator[Case]:
    """Yield typical acceptance for all rows. About half of the drafts are accepted."""
    settings = ("temperature", "top_k-top_p")
    for (model, V), (B, K), how in itertools.product(VOCABS.items(), BATCHES[1:], settings):

        def build(device: str, V: int = V, B: int = B, K: int = K, how: str = how) -> Built:
            table = make_table(B, V, device, typical=True, **REQUESTS[how])
            logits = peaked_logits(B * (K + 1), V, device)
            targets = torch.zeros(B * (K + 1), dtype=torch.int32, device=device)
            ids = torch.roll(logits.argmax(-1), 1).int()
            batch = replace(make_batch(B, K + 1, device), input_ids=ids)
            return Built(lambda: every_target(typical, logits)(targets, logits, table, batch))

        yield Case("typical", f"{model}-B{B}-K{K}-{how}", build, bytes=B * V * 2 * K)


def typical_tree_cases() -> Iterator[Case]:
    """Yield typical acceptance of a tree, among the children of each node."""

    def build(device: str) -> Built:
        B, Q, V = 8, 8, VOCABS["smollm2"]
        table = make_table(B, V, device, typical=True, **REQUESTS["penalties"])
        batch = make_batch(B, Q, device, tree=True)
        logits, targets = peaked_logits(B * Q, V, device), torch.zeros_like(batch.input_ids)
        return Built(lambda: every_target(typical, logits)(targets, logits, table, batch))

    yield Case("typical", "smollm2-B8-K7-tree", build, bytes=64 * 49152 * 2 + 9 * 49152 * 8)


def proposed(B: int, K: int, device: str) -> Proposal:
    """Return a deterministic proposal of zeros."""
    each, all_rows = (torch.zeros(*shape, dtype=torch.int32, device=device) for shape in ((B, K), (B,)))
    return Proposal(each, all_rows, each, all_rows, all_rows)


def verify_cases() -> Iterator[Case]:
    for (B, K), tree in itertools.product(BATCHES, (False, True)):

        def build(device: str, B: int = B, Q: int = K + 1, tree: bool = tree) -> Built:
            targets, ids = (torch.randint(0, 9, (B * Q,), device=device).int() for _ in range(2))
            batch = replace(make_batch(B, Q, device, tree), input_ids=ids)
            # Rows at their maximum length: the call does not change the state, so it can be repeated.
            table = make_table(B, VOCABS["qwen"], device, num_tokens=4096)
            return Built(lambda: commit(targets, batch, table, proposed(B, Q - 1, device)))

        yield Case("verify", f"B{B}-K{K}-{'tree' if tree else 'chain'}", build)


def layout_cases() -> Iterator[Case]:
    """Yield the layout of a step's batch, and that of a draft model's batch ("text")."""
    for B, K in ((1, 4), (64, 4), (64, 16), (256, 0)):
        for text in (False, True):

            def build(device: str, B: int = B, K: int = K, text: bool = text) -> Built:
                table, batch = make_table(B, 1, device, 32768, num_tokens=4000), make_batch(B, K + 1, device)
                drafts = None if text else proposed(B, K, device).drafts
                args = table, batch.rows, batch.base_len, batch.q_len, K + 1, drafts
                return Built(lambda: lay_out(*args))

            yield Case("layout", f"B{B}-K{K}{'-text' if text else ''}", build)


def trim_cases() -> Iterator[Case]:
    """Yield the selection of the drafts to verify."""
    for B, K in ((1, 4), (64, 16), (256, 3), (512, 1), (256, 0)):

        def build(device: str, B: int = B, K: int = K) -> Built:
            table, rows = make_table(B, 1, device, 32768, num_tokens=4000), make_batch(B, K + 1, device).rows
            _, estimates = Estimates.empty(2, 512, device)
            proposal = proposed(B, K, device)
            return Built(lambda: trim(table, rows, proposal, estimates))

        yield Case("trim", f"B{B}-K{K}", build)


def noise_cases() -> Iterator[Case]:
    """Yield the noise of the 16 most likely tokens of drafters."""
    for n in (1, 64):

        def build(device: str, n: int = n) -> Built:
            seeds, positions = (torch.arange(n, device=device) for _ in range(2))
            ids = torch.randint(0, VOCABS["qwen"], (n, 16), device=device).int()
            return Built(lambda: noise.draw(seeds, positions, ids))

        yield Case("noise", f"n{n}", build)
