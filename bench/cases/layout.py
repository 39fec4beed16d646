"""The beginning of a step: laying out its batch, and those of a drafter that writes ahead."""

from __future__ import annotations

from collections.abc import Iterator

from bench.cases import Built, Case
from bench.cases.speculation import make_batch, make_table, proposed
from nanospec.kernels.speculation.layout import lay_out, lay_out_text


def cases() -> Iterator[Case]:
    for B, K in ((1, 4), (64, 4), (64, 16), (256, 0)):
        for text in (False, True):

            def build(device: str, B: int = B, K: int = K, text: bool = text) -> Built:
                table, batch = make_table(B, 1, device, 32768, num_tokens=4000), make_batch(B, K + 1, device)
                if text:
                    given = table, batch.rows, batch.base_len, batch.q_len, K + 1
                    return Built(lambda: lay_out_text(*given))
                proposal = proposed(B, K, device)
                return Built(lambda: lay_out(table, batch.rows, proposal))

            yield Case("layout", f"B{B}-K{K}{'-text' if text else ''}", build)
