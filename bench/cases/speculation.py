"""The kernels of speculation: propose, sample, verify, commit, and log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import Built, Case
from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import accept
from nanospec.kernels.sampling.logprobs import logprobs
from nanospec.kernels.sampling.sample import Params, sample
from nanospec.kernels.speculation import commit, ngram, ngram_tree, verify

VOCABS = {"smollm2": 49152, "llama3": 128256, "qwen": 151936}
BATCHES = ((1, 0), (1, 4), (8, 4), (64, 4))  # (B, K)
MAX_STOPS = 8
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k-top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "penalties": {"shaped": True, "repetition": 1.1, "temperature": 1.0},
}


def cases() -> Iterator[Case]:
    yield from ngram_cases()
    yield from ngram_tree_cases()
    yield from sample_cases()
    yield from sample_tree_cases()
    yield from accept_cases()
    yield from accept_tree_cases()
    yield from verify_cases()
    yield from logprobs_cases()


def make_rows(B: int, Q: int, device: str, tree: bool = False) -> Batch:
    """B rows of Q tokens each, at position 1000."""
    i32 = torch.int32
    positions = (torch.arange(B * Q, dtype=i32, device=device) % Q) + 1000
    return Batch(
        positions=positions,
        slots=torch.zeros_like(positions),
        block_table=torch.zeros(B, 1, dtype=i32, device=device),
        q_start=torch.arange(B, dtype=i32, device=device) * Q,
        q_len=torch.full((B,), Q, dtype=i32, device=device),
        base_len=torch.full((B,), 1000, dtype=i32, device=device),
        max_q_len=Q,
        max_kv_len=1000 + Q,
        ancestors=torch.full((B * Q,), -1, dtype=torch.int64, device=device) if tree else None,
    )


def make_params(B: int, V: int, device: str, **values: float) -> Params:
    """Parameters of B request rows that change nothing, but for the given ones."""

    def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((B, *shape), value, dtype=dtype, device=device)

    i32 = torch.int32
    params = Params(
        temperature=full(0),
        top_k=full(0, dtype=i32),
        top_p=full(1),
        min_p=full(0),
        seed=full(7, dtype=torch.int64),
        min_len=full(0, dtype=i32),
        stop_ids=full(-1, MAX_STOPS, dtype=i32),
        repetition=full(1),
        presence=full(0),
        frequency=full(0),
        shaped=full(False, dtype=torch.bool),
        bias=full(0, V),
        in_prompt=full(False, V, dtype=torch.bool),
        output_counts=full(0, V, dtype=i32),
    )
    for name, value in values.items():
        getattr(params, name).fill_(value)
    return params


def peaked_logits(T: int, V: int, device: str) -> Tensor:
    """Logits as a language model has them: a few tokens hold most of the probability."""
    return (torch.randn(T, V, device=device) * 2.5 + 8 * torch.rand(T, V, device=device) ** 24).bfloat16()


def ngram_cases() -> Iterator[Case]:
    for B in (1, 8, 64, 256):
        for length in (1024, 4096, 32768):
            for max_n in (3, 5):

                def build(device: str, B: int = B, length: int = length, max_n: int = max_n) -> Built:
                    tokens = torch.randint(0, 2000, (B, 40960), dtype=torch.int32, device=device)
                    one = torch.ones(B, dtype=torch.int32, device=device)
                    rows = torch.arange(B, dtype=torch.int32, device=device)
                    return Built(
                        lambda: ngram.propose(
                            tokens, one * length, rows, one, one * max_n, one * 8, one * 40960, 5, max_n
                        )
                    )

                yield Case("ngram", f"B{B}-L{length}-n{max_n}", build, bytes=B * length * 4)


def ngram_tree_cases() -> Iterator[Case]:
    """Of two tokens, so that hundreds of places in each block match and none of the rounds is empty."""
    for B in (1, 8, 64):
        for length in (1024, 4096):
            for width, k in itertools.product((2, 4), (8, 16, 63)):

                def build(
                    device: str, B: int = B, length: int = length, width: int = width, k: int = k
                ) -> Built:
                    tokens = torch.randint(0, 2, (B, 40960), dtype=torch.int32, device=device)
                    one = torch.ones(B, dtype=torch.int32, device=device)
                    rows = torch.arange(B, dtype=torch.int32, device=device)
                    row = (tokens, one * length, rows, one, one * 3, one * k, one * 40960, one * width)
                    return Built(lambda: ngram_tree.propose(*row, k, 3, width))

                label = f"B{B}-L{length}-w{width}-K{k}"
                yield Case("ngram_tree", label, build, bytes=B * length * 4)


def sample_cases() -> Iterator[Case]:
    for model, V in VOCABS.items():
        for B, K in BATCHES:
            for name, values in FILTERS.items():

                def build(
                    device: str, V: int = V, B: int = B, Q: int = K + 1, values: dict[str, float] = values
                ) -> Built:
                    logits = peaked_logits(B * Q, V, device)
                    rows = torch.arange(B, dtype=torch.int32, device=device)
                    ids = torch.zeros(B * Q, dtype=torch.int32, device=device)
                    params, batch = make_params(B, V, device, **values), make_rows(B, Q, device)
                    peers = {"torch": lambda: _sample_with_torch(logits, **values)}
                    return Built(lambda: sample(logits, ids, rows, params, batch), peers)

                tables = 9 * V * B if "shaped" in values else 0  # bias, counts, in_prompt
                size = B * (K + 1) * V * 2 + tables
                yield Case("sample", f"{model}-B{B}-K{K}-{name}", build, bytes=size)


def sample_tree_cases() -> Iterator[Case]:
    """Penalties count a query's ancestors only: a kernel of its own."""

    def build(device: str) -> Built:
        B, Q, V = 8, 8, VOCABS["smollm2"]
        rows = torch.arange(B, dtype=torch.int32, device=device)
        ids = torch.zeros(B * Q, dtype=torch.int32, device=device)
        params, batch = make_params(B, V, device, **FILTERS["penalties"]), make_rows(B, Q, device, tree=True)
        logits = peaked_logits(B * Q, V, device)
        return Built(lambda: sample(logits, ids, rows, params, batch))

    yield Case("sample", "smollm2-B8-K7-tree", build, bytes=64 * 49152 * 2 + 9 * 49152 * 8)


def _sample_with_torch(logits: Tensor, **values: float) -> Tensor:
    """What a sampler written with torch's operations does (no penalties)."""
    if not values:
        return logits.argmax(-1)
    scores = logits.float() / values["temperature"]
    if "top_k" in values or "top_p" in values:
        scores, ids = scores.sort(-1, descending=True)
        if "top_k" in values:
            scores[:, int(values["top_k"]) :] = float("-inf")
        p = scores.softmax(-1)
        scores = scores.masked_fill(p.cumsum(-1) - p > values["top_p"], float("-inf"))
    drawn = (scores.softmax(-1) / torch.empty_like(scores).exponential_()).argmax(-1)
    return ids.gather(1, drawn[:, None]) if "top_k" in values or "top_p" in values else drawn


def accept_cases() -> Iterator[Case]:
    """The further rules, all rows asking for one. Half of the drafts are accepted, about."""
    for model, V in VOCABS.items():
        for B, K in BATCHES[1:]:
            for name in ("temperature", "top_k-top_p"):
                for rule in (accept.REJECTION, accept.TYPICAL):

                    def build(
                        device: str, V: int = V, B: int = B, K: int = K, name: str = name, rule: int = rule
                    ) -> Built:
                        i32 = torch.int32
                        rows = torch.arange(B, dtype=i32, device=device)
                        rules = torch.full((B,), rule, dtype=torch.int8, device=device)
                        params = make_params(B, V, device, **FILTERS[name])
                        batch = make_rows(B, K + 1, device)
                        logits = peaked_logits(B * (K + 1), V, device)
                        targets = torch.zeros(B * (K + 1), dtype=i32, device=device)
                        ids = torch.roll(logits.argmax(-1), 1).to(i32)
                        if rule == accept.TYPICAL:
                            return Built(
                                lambda: accept.accept(targets, logits, ids, rows, params, batch, rules)
                            )
                        guesses = logits.view(B, K + 1, V)[:, :K] + torch.randn(B, K, V, device=device)
                        drafts = (guesses.bfloat16(), torch.ones(B, dtype=torch.bool, device=device))
                        return Built(
                            lambda: accept.accept(
                                targets, logits, ids, rows, params, batch, rules, None, *drafts
                            )
                        )

                    size = B * V * 2 * (2 * K if rule == accept.REJECTION else K)
                    label = f"{model}-B{B}-K{K}-{accept.RULES[rule]}-{name}"
                    yield Case("accept", label, build, bytes=size)


def accept_tree_cases() -> Iterator[Case]:
    """Typical acceptance among the children of each node."""

    def build(device: str) -> Built:
        B, Q, V = 8, 8, VOCABS["smollm2"]
        i32 = torch.int32
        rows = torch.arange(B, dtype=i32, device=device)
        rules = torch.full((B,), accept.TYPICAL, dtype=torch.int8, device=device)
        params, batch = make_params(B, V, device, **FILTERS["penalties"]), make_rows(B, Q, device, tree=True)
        parents = ((torch.arange(B * Q, device=device) % Q - 1) // 2).to(i32)
        targets, ids = torch.zeros(2, B * Q, dtype=i32, device=device)
        logits = peaked_logits(B * Q, V, device)
        return Built(lambda: accept.accept(targets, logits, ids, rows, params, batch, rules, parents))

    yield Case("accept", "smollm2-B8-K7-typical-tree", build, bytes=64 * 49152 * 2 + 9 * 49152 * 8)


def verify_cases() -> Iterator[Case]:
    for B, K in BATCHES:
        for tree in (False, True):
            for fused in (False, True):

                def build(
                    device: str, B: int = B, Q: int = K + 1, tree: bool = tree, fused: bool = fused
                ) -> Built:
                    i32, V, capacity = torch.int32, VOCABS["qwen"], 4096
                    targets, ids = torch.randint(0, 9, (2, B * Q), dtype=i32, device=device)
                    one = torch.ones(B, dtype=i32, device=device)
                    rows = torch.arange(B, dtype=i32, device=device)
                    batch, parents = make_rows(B, Q, device), None
                    if tree:
                        parents = ((torch.arange(B * Q, device=device) % Q - 1) // 2).to(i32)
                    # Full rows: repeating the call finds the same state again.
                    state = (
                        torch.zeros(B, capacity, dtype=i32, device=device),
                        one * capacity,
                        torch.zeros(B, V, dtype=i32, device=device),
                        torch.zeros(B, dtype=torch.int8, device=device),
                        rows,
                    )
                    limits = (one * capacity, torch.full((B, MAX_STOPS), -1, dtype=i32, device=device))
                    if fused:
                        return Built(
                            lambda: commit.verify_and_commit(targets, ids, batch, parents, *state, *limits)
                        )

                    def apart() -> Tensor:
                        verdict = verify.verify(targets, ids, batch, parents)
                        emitted, count, _ = verdict
                        return commit.commit(*state, emitted, count, *limits)

                    return Built(apart)

                form = "tree" if tree else "chain"
                how = "fused" if fused else "apart"
                yield Case("verify", f"B{B}-K{K}-{form}-{how}", build)


def logprobs_cases() -> Iterator[Case]:
    for model, V in VOCABS.items():
        for N in (1, 40):

            def build(device: str, V: int = V, N: int = N) -> Built:
                logits = peaked_logits(N, V, device)
                index = torch.arange(N, device=device)
                tokens = torch.zeros(N, dtype=torch.int32, device=device)

                def with_torch() -> Tensor:
                    values = logits.float().log_softmax(-1)
                    return values.topk(20).values

                return Built(lambda: logprobs(logits, index, tokens, 20), {"torch": with_torch})

            yield Case("logprobs", f"{model}-N{N}-top20", build, bytes=N * V * 2)
