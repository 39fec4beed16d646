"""What a step does beside its neighbours' parts where weights are split among ranks: sums and candidates."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.cases import Built, Case
from bench.cases.speculation import REQUESTS, VOCABS, make_batch, make_table
from nanospec.kernels.layer.norm import Norm
from nanospec.kernels.layer.residual import residual_add
from nanospec.kernels.sampling import across

RANKS = (2, 4, 8)
HIDDEN = {"llama-3.2-1b": 2048, "qwen3-8b": 4096, "llama-3.3-70b": 8192}


def cases() -> Iterator[Case]:
    for ranks in RANKS:
        for (name, hidden), T in ((item, T) for item in HIDDEN.items() for T in (1, 64)):
            yield sum_case(f"{name}-R{ranks}-T{T}", ranks, hidden, T)
        for name, vocab in VOCABS.items():
            yield best_case(f"{name}-R{ranks}", vocab, ranks)


def sum_case(label: str, ranks: int, hidden: int, T: int) -> Case:
    """The sums of a product's parts, added to the residual stream."""

    def build(device: str) -> Built:
        parts = torch.randn(ranks, T, hidden, device=device, dtype=torch.bfloat16)
        norm = Norm(torch.randn(hidden, device=device), 1e-6)
        return Built(lambda: residual_add(parts, parts[0], norm))

    return Case("residual_add", label, build, bytes=2 * T * hidden * (ranks + 3))


def best_case(label: str, vocab: int, ranks: int, B: int = 8, K: int = 4) -> Case:
    """A rank's candidates for requests that draw with temperature."""
    T, part = B * (K + 1), -(-vocab // ranks)

    def build(device: str) -> Built:
        table, batch = make_table(B, vocab, device, **REQUESTS["temperature"]), make_batch(B, K + 1, device)
        logits = torch.randn(T, part, device=device, dtype=torch.bfloat16)
        return Built(lambda: across.best(logits, part, part, table, batch))

    return Case("best", label, build, bytes=2 * T * part)
