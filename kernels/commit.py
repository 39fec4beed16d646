"""Append a step's tokens to the history and stop the rows that are done.

    tokens      [S, max_len] int32, num_tokens [S] int32        updated in place
    output_counts [S, V] int32                                  updated in place (penalties)
    finished    [S] int8                                        updated in place, codes below
    rows        [B] int32       request row of each batch row, -1 for padding
    emitted     [B, Q] int32, num_emitted [B] int32             from `verify`
    max_len     [S] int32       a request ends when it holds this many tokens
    stop_ids    [S, M] int32    padded with -1
    returns     [B] int32       how many of the emitted tokens were kept

The run of emitted tokens is cut after the first stop token and at the length limit, whichever comes
first. A NaN marker (-1) among them ends the row before it. A row that has finished is left alone, so
that the device may run ahead of the host that retires it.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUNNING, STOPPED, LENGTH, NAN = 0, 1, 2, 3


def commit(
    tokens: Tensor,
    num_tokens: Tensor,
    output_counts: Tensor,
    finished: Tensor,
    rows: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    max_len: Tensor,
    stop_ids: Tensor,
) -> Tensor:
    """Commit the emitted tokens in place; returns how many each row kept."""
    return naive(
        tokens, num_tokens, output_counts, finished, rows, emitted, num_emitted, max_len, stop_ids
    )


def naive(
    tokens: Tensor,
    num_tokens: Tensor,
    output_counts: Tensor,
    finished: Tensor,
    rows: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    max_len: Tensor,
    stop_ids: Tensor,
) -> Tensor:
    """The specification, decided in plain Python and written by few calls; also the CPU path."""
    lengths, limits, codes = num_tokens.tolist(), max_len.tolist(), finished.tolist()
    runs, stops = emitted.tolist(), stop_ids.tolist()
    kept = [0] * len(runs)
    written: list[tuple[int, int, int]] = []  # (row, index, token)
    for b, (s, count) in enumerate(zip(rows.tolist(), num_emitted.tolist(), strict=True)):
        if s < 0 or count == 0 or codes[s] != RUNNING:
            continue
        for token in runs[b][:count]:
            if lengths[s] >= limits[s]:
                codes[s] = LENGTH
            elif token < 0:
                codes[s] = NAN
            if codes[s] != RUNNING:
                break
            written.append((s, lengths[s], token))
            lengths[s] += 1
            kept[b] += 1
            if token in stops[s]:
                codes[s] = STOPPED
                break
        if codes[s] == RUNNING and lengths[s] >= limits[s]:
            codes[s] = LENGTH
    if written:
        s, place, token = torch.tensor(written, device=tokens.device).unbind(1)
        tokens[s, place] = token.int()
        output_counts.index_put_((s, token), torch.ones_like(token, dtype=torch.int32), accumulate=True)
    num_tokens.copy_(torch.tensor(lengths, dtype=torch.int32))
    finished.copy_(torch.tensor(codes, dtype=torch.int8))
    return torch.tensor(kept, dtype=torch.int32, device=tokens.device)
