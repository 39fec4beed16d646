"""Workers for which something other than the model decides which tokens come out. For benchmarks only.

Where no real weights fit, a benchmark can still do all the work of real decoding at a realistic
acceptance, in two ways:

* `ReplayWorker`: the output of each request is a given reference text. What is drafted and accepted is
  then what real text would give, with any weights.
* `SyntheticWorker`: every request always has drafts, and each is accepted with a given probability.

Everything that comes out carries the worker's label, `simulated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nanospec.config import EngineConfig
from nanospec.device.admission import Admission
from nanospec.device.step import Step
from nanospec.device.worker import Worker
from nanospec.drafters.base import Drafter, guesses, room
from nanospec.kernels.batch import Batch
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model

TOKENS = 32  # synthetic text is made of the ids below


class SimulatedStep(Step):
    """A step with other targets than the model's; they must not wait for the device."""

    targets: Callable[[Tensor, Batch], Tensor]

    def draw(self, logits: Tensor, batch: Batch, proposal: Proposal) -> Tensor:
        return self.targets(super().draw(logits, batch, proposal), batch)


class SimulatedWorker(Worker):
    """A worker whose steps ask `targets` for the tokens, [T] int32, in place of those `drawn`."""

    def make_step(self, kind: type[Step] = Step) -> Step:
        step = super().make_step(SimulatedStep)
        step.targets = self.targets  # type: ignore[attr-defined]
        return step

    def targets(self, drawn: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


class ReplayWorker(SimulatedWorker):
    """The output of a request is its reference text, by prompt; behind its end, the model's own."""

    simulated = "replay"

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        drafters: Sequence[Drafter],
        references: Mapping[tuple[int, ...], Sequence[int]],
    ) -> None:
        """`references`: prompt ids -> the output's ids."""
        self.references = references
        super().__init__(config, model, drafters)

    def make_step(self, kind: type[Step] = Step) -> Step:
        self._texts = torch.zeros_like(self.table.tokens)  # prompt and output
        self._lengths = torch.zeros_like(self.table.num_tokens)
        return super().make_step(kind)

    def admit(self, requests: Sequence[Admission]) -> None:
        super().admit(requests)
        for request in requests:
            prompt = request.tokens[: request.num_prompt]
            text = [*prompt, *self.references[tuple(prompt)]][: self._texts.shape[1]]
            self.writes.put(self._texts, request.row, text)
            self.writes.set(self._lengths, request.row, len(text))

    def targets(self, drawn: Tensor, batch: Batch) -> Tensor:
        row = batch.rows.clamp(min=0)[_owner(batch)]
        at = batch.positions + 1
        known = at < self._lengths[row]
        return torch.where(known, self._texts[row, torch.where(known, at, 0)], drawn)


class SyntheticDrafter(Drafter):
    """Always drafts as many tokens as the limits allow; which ones does not matter."""

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        start = table.num_tokens[rows.clamp(min=0)]
        drafts = (start[:, None] + torch.arange(k, device=rows.device)).int() % TOKENS
        return guesses(drafts, room(table, rows, k))


class SyntheticWorker(SimulatedWorker):
    """Accepts each draft with probability `acceptance`, by a hash of its request row and position."""

    def __init__(self, acceptance: float, config: EngineConfig, model: Model) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance={acceptance} must be between 0 and 1.")
        self.simulated = f"synthetic acceptance {acceptance:g}"
        self._threshold = int(acceptance * 2**32)
        super().__init__(config, model, [SyntheticDrafter()])

    def targets(self, drawn: Tensor, batch: Batch) -> Tensor:
        draft = batch.input_ids.roll(-1)  # what follows each token in its row; the bonus may be anything
        x = batch.positions.long() * 0x9E3779B1 + batch.rows[_owner(batch)].long() * 0x85EBCA77
        x = ((x ^ x >> 15) & 0xFFFFFFFF) * 0x2C1B3C6D
        bits = (x ^ x >> 12) & 0xFFFFFFFF
        wrong = (draft + 1) % TOKENS
        return torch.where(bits < self._threshold, draft, wrong)


def _owner(batch: Batch) -> Tensor:
    """[T] int64: the batch row of each flat token."""
    t = torch.arange(batch.num_tokens, device=batch.q_start.device, dtype=batch.q_start.dtype)
    return torch.searchsorted(batch.q_start, t, right=True) - 1
