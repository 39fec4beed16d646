"""Compare the drafts with the target's own tokens: the second half of verification.

    targets    [T] int32        the target's token after each scored token (`sample`)
    input_ids  [T] int32        last committed token of each row, then its drafts
    parents    [T] int32        tree only: place in its own row (0 .. q_len-1) of each token's parent
    emitted    [B, max_q_len] int32   the tokens the step yields, -1 beyond their number
    num_emitted [B] int32       accepted drafts + 1, 0 for rows of length 0
    path       [B, max_q_len] int32   place in its row of the query that drew each emitted token, so
                                that the KV of accepted tree nodes can be moved into place; 0 beyond

The rule: the target draws its own token x at each position. A draft is accepted iff it equals x; the
first that does not is replaced by x; if all match, the last x is the bonus. In a tree, go from each
node to the first child that carries x. So the emitted tokens are exactly those of decoding without
drafts.

Kernel: one program of one warp per row; `commit.verify_and_commit` does both in one launch. K < 1024.
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

MAX_Q_LEN = 1024


class Verdict(NamedTuple):
    """See the module docstring."""

    emitted: Tensor
    num_emitted: Tensor
    path: Tensor


def verify(targets: Tensor, input_ids: Tensor, batch: Batch, parents: Tensor | None = None) -> Verdict:
    """Walk each row's drafts along the target's tokens."""
    return (launch if use_triton(targets) else naive)(targets, input_ids, batch, parents)


def naive(targets: Tensor, input_ids: Tensor, batch: Batch, parents: Tensor | None = None) -> Verdict:
    """The specification in plain Python; also the CPU path, since the tensors are tiny."""
    x, ids, Q = targets.tolist(), input_ids.tolist(), batch.max_q_len
    above = None if parents is None else parents.tolist()
    emitted, num_emitted, paths = [], [], []
    for start, n in zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True):
        path = [0] if n else []
        while 0 < len(path) < n:  # also ends a walk through parents in a circle
            node, drawn = path[-1], x[start + path[-1]]
            if above is None:
                children = [node + 1] if node + 1 < n else []
            else:
                children = [c for c in range(1, n) if above[start + c] == node]
            accepted = [c for c in children if ids[start + c] == drawn]
            if not accepted:
                break
            path.append(accepted[0])
        emitted.append([x[start + node] for node in path] + [-1] * (Q - len(path)))
        num_emitted.append(len(path))
        paths.append(path + [0] * (Q - len(path)))
    columns = (emitted, num_emitted, paths)
    return Verdict(*(torch.tensor(c, dtype=torch.int32, device=targets.device) for c in columns))


@triton.jit
def walk(targets, input_ids, parents, start, n, WIDTH: tl.constexpr):
    """(emitted [WIDTH], their number, path [WIDTH]) of the row of n tokens from `start` on."""
    place = tl.arange(0, WIDTH)
    inside = place < n
    draft = inside & (place > 0)
    x = tl.load(targets + start + place, inside, other=-1)
    ids = tl.load(input_ids + start + place, inside, other=-1)
    if parents is None:
        # The accepted run ends at the first draft that is not the target of the token before it.
        before = tl.load(targets + start + place - 1, draft, other=-1)
        count = tl.min(tl.where(draft & (ids != before), place, n))
        path = tl.where(place < count, place, 0)
        emitted = tl.where(place < count, x, -1)
    else:
        parent = tl.load(parents + start + place, draft, other=-1)
        path = tl.zeros([WIDTH], tl.int32)
        emitted = tl.full([WIDTH], -1, tl.int32)
        count, node = n * 0, tl.where(n > 0, 0, WIDTH)
        while (node < WIDTH) & (count < n):  # ends a walk in a circle too
            drawn = tl.sum(tl.where(place == node, x, 0))
            path = tl.where(place == count, node, path)
            emitted = tl.where(place == count, drawn, emitted)
            count += 1
            node = tl.min(tl.where(draft & (parent == node) & (ids == drawn), place, WIDTH))
    return emitted, count, path


@triton.jit
def store_verdict(emitted, count, path, emitted_out, count_out, path_out, max_q_len, WIDTH: tl.constexpr):
    b, place = tl.program_id(0), tl.arange(0, WIDTH)
    tl.store(emitted_out + b * max_q_len + place, emitted, place < max_q_len)
    tl.store(path_out + b * max_q_len + place, path, place < max_q_len)
    tl.store(count_out + b, count)


@triton.jit(do_not_specialize=["max_q_len"])
def _verify(
    targets, input_ids, parents, q_start, q_len, emitted_out, count_out, path_out, max_q_len,
    WIDTH: tl.constexpr,
):  # fmt: skip
    start, n = tl.load(q_start + tl.program_id(0)), tl.load(q_len + tl.program_id(0))
    emitted, count, path = walk(targets, input_ids, parents, start, n, WIDTH)
    store_verdict(emitted, count, path, emitted_out, count_out, path_out, max_q_len, WIDTH)


def empty_verdict(batch: Batch) -> Verdict:
    if batch.max_q_len > MAX_Q_LEN:
        raise ValueError(f"{batch.max_q_len} tokens per row exceed the limit of {MAX_Q_LEN}.")
    grid, device = (batch.num_rows, batch.max_q_len), batch.q_len.device
    return Verdict(
        torch.empty(grid, dtype=torch.int32, device=device),
        torch.empty(batch.num_rows, dtype=torch.int32, device=device),
        torch.empty(grid, dtype=torch.int32, device=device),
    )


def launch(targets: Tensor, input_ids: Tensor, batch: Batch, parents: Tensor | None = None) -> Verdict:
    verdict = empty_verdict(batch)
    if batch.num_rows:
        _verify[(batch.num_rows,)](
            targets, input_ids, parents, batch.q_start, batch.q_len, *verdict, batch.max_q_len,
            WIDTH=next_power_of_2(batch.max_q_len), num_warps=1,
        )  # fmt: skip
    return verdict
