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

Kernel: one program of one warp per row. `verify_and_commit` is `verify` and `commit` in one launch.
No two batch rows may be the same request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from ..launch import next_power_of_2
from . import verify
from .verify import Verdict, store_verdict, walk

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
    implementation = launch if use_triton(tokens) else naive
    return implementation(
        tokens, num_tokens, output_counts, finished, rows, emitted, num_emitted, max_len, stop_ids
    )


def verify_and_commit(
    targets: Tensor,
    input_ids: Tensor,
    batch: Batch,
    parents: Tensor | None,
    tokens: Tensor,
    num_tokens: Tensor,
    output_counts: Tensor,
    finished: Tensor,
    rows: Tensor,
    max_len: Tensor,
    stop_ids: Tensor,
) -> tuple[Verdict, Tensor]:
    """`verify.verify` and `commit` at once; returns what both return."""
    state = (tokens, num_tokens, output_counts, finished, rows)
    if use_triton(tokens):
        return launch_both(targets, input_ids, batch, parents, *state, max_len, stop_ids)
    verdict = verify.naive(targets, input_ids, batch, parents)
    return verdict, naive(*state, verdict.emitted, verdict.num_emitted, max_len, stop_ids)


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


@triton.jit
def _append(state, s, emitted, count, WIDTH: tl.constexpr, STOPS: tl.constexpr):
    """Commit the first `count` of the `emitted` [WIDTH] tokens to request row s; how many were kept."""
    kept = 0
    code = tl.load(state.finished + s, s >= 0, other=1)
    if (code == 0) & (count > 0):  # RUNNING
        kept = _append_running(state, s, emitted, count, WIDTH, STOPS)
    return kept


@triton.jit
def _append_running(state, s, emitted, count, WIDTH: tl.constexpr, STOPS: tl.constexpr):
    never = 2 * WIDTH
    place, m = tl.arange(0, WIDTH), tl.arange(0, STOPS)
    stops = tl.load(state.stop_ids + s * state.num_stops + m, m < state.num_stops, other=-1)
    is_stop = tl.max((emitted[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    inside = place < count
    nan = tl.min(tl.where(inside & (emitted < 0), place, never))
    stop = tl.min(tl.where(inside & is_stop & (emitted >= 0), place, never))
    start, limit = tl.load(state.num_tokens + s), tl.load(state.max_len + s)
    room = tl.maximum(limit - start, 0)
    kept = tl.minimum(tl.minimum(count, room), tl.minimum(nan, stop + 1))
    code = tl.where(nan == kept, 3, 0)  # NAN, RUNNING
    code = tl.where(kept == room, 2, code)  # LENGTH
    code = tl.where(kept == stop + 1, 1, code)  # STOPPED

    keep = place < kept
    row = s.to(tl.int64)
    tl.store(state.tokens + row * state.stride + start + place, emitted, keep)
    # Atomic, since a token may occur twice in the run.
    tl.atomic_add(state.output_counts + row * state.vocab + emitted, 1, keep, sem="relaxed")
    tl.store(state.num_tokens + s, start + kept)
    tl.store(state.finished + s, code.to(tl.int8))
    return kept


@triton.jit(do_not_specialize=["max_q_len"])
def _commit(state, rows, emitted, num_emitted, kept_out, max_q_len, WIDTH: tl.constexpr, STOPS: tl.constexpr):
    b, place = tl.program_id(0), tl.arange(0, WIDTH)
    run = tl.load(emitted + b * max_q_len + place, place < max_q_len, other=-1)
    kept = _append(state, tl.load(rows + b), run, tl.load(num_emitted + b), WIDTH, STOPS)
    tl.store(kept_out + b, kept)


@triton.jit(do_not_specialize=["max_q_len"])
def _verify_and_commit(
    targets, input_ids, parents, q_start, q_len, emitted_out, count_out, path_out,
    state, rows, kept_out, max_q_len, WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start, n = tl.load(q_start + b), tl.load(q_len + b)
    emitted, count, path = walk(targets, input_ids, parents, start, n, WIDTH)
    store_verdict(emitted, count, path, emitted_out, count_out, path_out, max_q_len, WIDTH)
    tl.store(kept_out + b, _append(state, tl.load(rows + b), emitted, count, WIDTH, STOPS))


class _State(NamedTuple):
    """The tables of the request rows. A tuple keeps the kernels' argument lists short."""

    tokens: Tensor
    stride: int
    num_tokens: Tensor
    output_counts: Tensor
    vocab: int
    finished: Tensor
    max_len: Tensor
    stop_ids: Tensor
    num_stops: int


def _checked(
    tokens: Tensor,
    num_tokens: Tensor,
    output_counts: Tensor,
    finished: Tensor,
    max_len: Tensor,
    stop_ids: Tensor,
) -> _State:
    for name, table in (("tokens", tokens), ("output_counts", output_counts), ("stop_ids", stop_ids)):
        if not table.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous.")
    return _State(
        tokens, tokens.shape[1], num_tokens, output_counts, output_counts.shape[1], finished, max_len,
        stop_ids, stop_ids.shape[1],
    )  # fmt: skip


def launch(
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
    state = _checked(tokens, num_tokens, output_counts, finished, max_len, stop_ids)
    B, Q = emitted.shape
    kept = torch.empty_like(num_emitted)
    if B:
        _commit[(B,)](
            state, rows, emitted.contiguous(), num_emitted, kept, Q,
            WIDTH=next_power_of_2(Q), STOPS=next_power_of_2(state.num_stops), num_warps=1,
        )  # fmt: skip
    return kept


def launch_both(
    targets: Tensor,
    input_ids: Tensor,
    batch: Batch,
    parents: Tensor | None,
    tokens: Tensor,
    num_tokens: Tensor,
    output_counts: Tensor,
    finished: Tensor,
    rows: Tensor,
    max_len: Tensor,
    stop_ids: Tensor,
) -> tuple[Verdict, Tensor]:
    state = _checked(tokens, num_tokens, output_counts, finished, max_len, stop_ids)
    verdict, Q = verify.empty_verdict(batch), batch.max_q_len
    kept = torch.empty_like(verdict.num_emitted)
    if batch.num_rows:
        _verify_and_commit[(batch.num_rows,)](
            targets, input_ids, parents, batch.q_start, batch.q_len, *verdict, state, rows, kept, Q,
            WIDTH=next_power_of_2(Q), STOPS=next_power_of_2(state.num_stops), num_warps=1,
        )  # fmt: skip
    return verdict, kept
