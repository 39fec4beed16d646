"""The ends of a step: laying out its batch, and reporting its results."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import Built, Case
from bench.cases.speculation import make_batch, make_table
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.report import report
from nanospec.kernels.speculation.verify import Verdict


def cases() -> Iterator[Case]:
    for B, K in ((1, 4), (64, 4), (64, 16), (256, 0)):
        for what in ("lay_out", "report"):

            def build(device: str, B: int = B, K: int = K, what: str = what) -> Built:
                def ints(*shape: int) -> Tensor:
                    return torch.zeros(*shape, dtype=torch.int32, device=device)

                table, batch = make_table(B, 1, device, 32768, num_tokens=4000), make_batch(B, K + 1, device)
                proposal = Proposal(ints(B, K), ints(B), ints(B, K), ints(B), ints(B))
                if what == "lay_out":
                    return Built(lambda: lay_out(table, batch.rows, proposal))
                verdict = Verdict(ints(B, K + 1), ints(B), ints(B, K + 1), ints(B))
                return Built(lambda: report(batch, proposal, verdict, table))

            yield Case("layout", f"B{B}-K{K}-{what}", build)
