"""What the host sends: requests that get their rows, and block tables that grow."""

from __future__ import annotations

from collections.abc import Iterator

from bench.cases import Built, Case
from bench.cases.speculation import make_table
from nanospec.config import SamplingParams, SpecConfig
from nanospec.device.admission import Admission, HostWrites, write_blocks, write_row

PROMPT, BLOCK_SIZE = 1000, 16


def cases() -> Iterator[Case]:
    for B in (1, 64):
        for what in ("admission", "growth"):

            def build(device: str, B: int = B, what: str = what) -> Built:
                table, writes, spec = make_table(B, 1, device), HostWrites(), SpecConfig()
                tokens, blocks = list(range(PROMPT)), list(range(PROMPT // BLOCK_SIZE + 1))

                def run() -> None:
                    for row in range(B):
                        if what == "growth":
                            write_blocks(writes, table, row, blocks, len(blocks) - 1)
                            continue
                        request = Admission(row, tokens, PROMPT, 2000, blocks, 0, row, (0,), SamplingParams())
                        write_row(writes, table, request, spec)
                    writes.flush()

                return Built(run)

            yield Case("host_writes", f"B{B}-{what}", build, timed=False)  # most of it is the host's
