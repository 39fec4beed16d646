"""For benchmarks only: let something other than the model decide which tokens come out.

Where no real weights fit, a benchmark can still do all the work of real decoding at a realistic
acceptance, in two ways:

* `Replay`: the output of each request is a given reference text. What is drafted and accepted is then
  what real text would give, with any weights.
* `Synthetic`: every request always has drafts, and each is accepted with a given probability.

A simulation can only be passed to `Engine` itself (`LLM` and the command line do not take one), and
everything that comes out carries its label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanospec.drafters.base import Drafter, nothing, room
from nanospec.kernels.batch import Batch
from nanospec.kernels.speculation.proposal import NGRAM, Proposal
from nanospec.request import Request
from nanospec.state import State

TOKENS = 32  # synthetic text is made of the ids below


class Simulation(Protocol):
    """Replaces the target's tokens.

    Attributes:
        label: what results are marked with.
        drafter: replaces the engine's drafter if not None.
    """

    label: str
    drafter: SyntheticDrafter | None

    def attach(self, state: State) -> None:
        """Make what `targets` reads, at addresses that stay, before any step is recorded."""
        ...

    def admit(self, request: Request) -> None:
        """A request got its row."""
        ...

    def targets(self, drawn: Tensor, input_ids: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        """[T] int32 in place of the tokens that the model drew. Must not wait for the device."""
        ...


class Replay:
    """The output of a request is its reference text, by prompt; behind its end, the model's own."""

    label = "replay"
    drafter: SyntheticDrafter | None = None

    def __init__(self, references: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """`references`: prompt ids -> the output's ids."""
        self.references = references

    def attach(self, state: State) -> None:
        self._texts = torch.zeros_like(state.tokens)  # prompt and output
        self._lengths = torch.zeros_like(state.num_tokens)

    def admit(self, request: Request) -> None:
        text = [*request.prompt_ids, *self.references[tuple(request.prompt_ids)]]
        text = text[: self._texts.shape[1]]
        self._texts[request.row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self._lengths[request.row] = len(text)

    def targets(self, drawn: Tensor, input_ids: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        row = rows.clamp(min=0)[_owner(batch)].long()
        at = batch.positions + 1
        known = at < self._lengths[row]
        return torch.where(known, self._texts[row, torch.where(known, at, 0).long()], drawn)


class SyntheticDrafter(Drafter):
    """Always drafts as many tokens as the limits allow; which ones does not matter."""

    def propose(self, state: State, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        start = state.num_tokens[rows.clamp(min=0).long()]
        drafts = (start[:, None] + torch.arange(k, device=rows.device)).int() % TOKENS
        none = nothing(rows, k)
        return none._replace(drafts=drafts, num_drafts=room(state, rows, k), drafter=none.drafter * 0 + NGRAM)


class Synthetic:
    """Accepts each draft with probability `acceptance`, by a hash of its request row and position."""

    def __init__(self, acceptance: float) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance={acceptance} must be between 0 and 1.")
        self.label = f"synthetic acceptance {acceptance:g}"
        self.drafter: SyntheticDrafter | None = SyntheticDrafter()
        self._threshold = int(acceptance * 2**32)

    def attach(self, state: State) -> None:
        pass

    def admit(self, request: Request) -> None:
        pass

    def targets(self, drawn: Tensor, input_ids: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        draft = input_ids.roll(-1)  # what follows each token in its row; the bonus may be anything
        x = batch.positions.long() * 0x9E3779B1 + rows[_owner(batch)].long() * 0x85EBCA77
        x = ((x ^ x >> 15) & 0xFFFFFFFF) * 0x2C1B3C6D
        bits = (x ^ x >> 12) & 0xFFFFFFFF
        wrong = (draft + 1) % TOKENS
        return torch.where(bits < self._threshold, draft, wrong)


def _owner(batch: Batch) -> Tensor:
    """[T] int64: the batch row of each flat token."""
    t = torch.arange(batch.num_tokens, device=batch.q_start.device, dtype=batch.q_start.dtype)
    return torch.searchsorted(batch.q_start, t, right=True) - 1
