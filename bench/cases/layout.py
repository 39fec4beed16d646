"""The ends of a padded step: laying out its batch, and reporting its results."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import Built, Case
from nanospec.kernels.speculation import layout
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.verify import Verdict


def cases() -> Iterator[Case]:
    for B, K in ((1, 4), (64, 4), (64, 16), (256, 0)):
        for what in ("lay_out", "report"):

            def build(device: str, B: int = B, K: int = K, what: str = what) -> Built:
                def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
                    return torch.zeros(*shape, dtype=dtype, device=device)

                rows = torch.arange(B, dtype=torch.int32, device=device)
                finished = ints(B, dtype=torch.int8)
                proposal = Proposal(ints(B, K), ints(B), ints(B, K), ints(B), ints(B))
                if what == "lay_out":
                    tables = (ints(B, 32768), ints(B) + 4000, finished, ints(B, 2048))
                    return Built(lambda: layout.lay_out(rows, proposal, *tables, 16, K))
                verdict = Verdict(ints(B, K + 1), ints(B), ints(B, K + 1))
                return Built(lambda: layout.report(rows, ints(B), proposal, verdict, ints(B), finished))

            yield Case("layout", f"B{B}-K{K}-{what}", build)
