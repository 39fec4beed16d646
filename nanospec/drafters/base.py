"""What every drafter has in common.

One step:   propose -> forward, verify, commit (`runner.py`) -> learn

All of it runs inside the recorded step, so nothing here waits for the device, except where the naive
implementation runs, which is on a CPU. What a drafter remembers of a request lies in device rows of its
own, one per request row, and a last one that padding rows may write to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.speculation.commit import RUNNING
from ..kernels.speculation.proposal import NOBODY, OWN, Proposal
from ..kernels.speculation.verify import Verdict
from ..state import State


class Drafter:
    """Guesses tokens from the device rows. Only `propose` must be defined.

    Attributes:
        max_drafts: the most it ever guesses for a row.
        has_model: whether it runs a model, so that `passes` matters.
        has_cache: whether it keeps K/V of its own, which `prefill` fills.
        catch_up: how many tokens of a row's text may be missing in there when a recorded step begins.
    """

    max_drafts = 63
    has_model = False
    has_cache = False
    catch_up = 0

    def propose(self, state: State, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        """Up to `k` drafts for each of the request rows [B] int32; none for -1.

        Args:
            passes: the most drafts that a model may be run for; at 0 it is not run at all.
            max_kv_len: an upper bound of the rows' tokens + k.
        """
        raise NotImplementedError

    def learn(
        self, state: State, rows: Tensor, proposal: Proposal, hidden: Tensor, batch: Batch, verdict: Verdict
    ) -> None:
        """See what the target made of the drafts verified: its hidden states [T, H] and its verdict over
        `batch`, which is committed already. `rows` [B]: the running request rows, -1 for none."""

    def admit(self, row: int, num_computed: int) -> None:
        """A new request took the row; the cache holds `num_computed` tokens of it, or will before the next
        step."""

    def prefill(self, rows: Tensor, input_ids: Tensor, batch: Batch) -> None:
        """Compute K/V of pieces of the texts of request rows [B]."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks of the cache, see `Runner.clear`."""

    def rehearse(self, state: State, count: int) -> None:
        """Make the first `count` rows, as `state` has them now, draft when a step is timed."""

    def measure(self) -> None:
        """Time what `ms` tells."""

    def ms(self, batch: int, passes: int) -> float:
        """Milliseconds that so many passes for `batch` rows take, beyond what the step takes."""
        return 0.0


def room(state: State, rows: Tensor, k: int) -> Tensor:
    """[B] int32: how many drafts each request row can use, 0 for rows that take no part."""
    index = rows.clamp(min=0).long()
    left = torch.minimum(state.limit[index], state.max_len[index] - state.num_tokens[index] - 1)
    takes_part = (rows >= 0) & (state.finished[index] == RUNNING)
    return torch.where(takes_part, left.clamp(0, k), 0)


def nothing(rows: Tensor, k: int) -> Proposal:
    """No drafts for any of the rows [B]."""
    none = torch.zeros_like(rows)
    grid = none.new_zeros(len(rows), k)
    return Proposal(grid, none, grid + OWN, none.clone(), none + NOBODY)
