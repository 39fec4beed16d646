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
node to the child that carries x. So the emitted tokens are exactly those of decoding without drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import Rows


class Verdict(NamedTuple):
    """See the module docstring."""

    emitted: Tensor
    num_emitted: Tensor
    path: Tensor


def verify(targets: Tensor, input_ids: Tensor, batch: Rows, parents: Tensor | None = None) -> Verdict:
    """Walk each row's drafts along the target's tokens."""
    return naive(targets, input_ids, batch, parents)


def naive(targets: Tensor, input_ids: Tensor, batch: Rows, parents: Tensor | None = None) -> Verdict:
    """The specification in plain Python; also the CPU path, since the tensors are tiny."""
    x, ids, Q = targets.tolist(), input_ids.tolist(), batch.max_q_len
    above = None if parents is None else parents.tolist()
    emitted, num_emitted, paths = [], [], []
    for start, n in zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True):
        path = [0] if n else []
        while path:
            node, drawn = path[-1], x[start + path[-1]]
            if above is None:
                children = range(node + 1, min(node + 2, n))
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
