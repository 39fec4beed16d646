"""What the device does: fill the cache with prompts, and the speculative step.

    propose -> forward -> verify -> commit

The step reads and writes `State` only. It exists in two forms (see `kernels/rows.py`): *padded*, every
row K+1 tokens long and all shapes known beforehand, which is what a recording needs (`graphs.py`); and
*packed*, for a CPU, where a row without drafts costs one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from bench.simulation import Simulation

from .costs import StepCosts, forward_cost, kv_shape
from .drafters import Drafter
from .drafters.base import nothing
from .kernels.batch import Batch
from .kernels.dispatch import use_triton
from .kernels.sampling.accept import accept
from .kernels.sampling.logprobs import Logprobs, logprobs
from .kernels.sampling.sample import sample
from .kernels.speculation.commit import RUNNING, verify_and_commit
from .kernels.speculation.kv_move import kv_move
from .kernels.speculation.layout import NUM_COLUMNS, lay_out, pack, report
from .kernels.speculation.proposal import MODEL, Proposal
from .metrics import Metrics
from .models.decoder import Model
from .policy import Policy
from .state import State

Chunk = tuple[int, int, int]  # request row, first token, number of tokens


class StepResult(NamedTuple):
    """What a step of B rows gave, on the device.

    Attributes:
        table: [B, 6 + 2 Q] int32, see `kernels/layout.py`. At a stop more drafts may be accepted than kept.
        path, q_start, logits: which row of the logits each token was drawn from: that of query
            q_start[b] + path[b, j]. [B, Q] int32, [B] int32, [T, V].
    """

    table: Tensor
    path: Tensor
    q_start: Tensor
    logits: Tensor


class Runner:
    """The model, its KV cache and the device rows."""

    def __init__(
        self,
        model: Model,
        state: State,
        num_blocks: int,
        block_size: int,
        drafter: Drafter | None,
        metrics: Metrics,
        simulation: Simulation | None = None,
        exact: bool = True,
    ) -> None:
        """`exact`: no row asks for another rule of acceptance, so that steps need not look."""
        self.exact = exact
        self.model, self.state = model, state
        self.drafter, self.metrics, self.simulation = drafter, metrics, simulation
        self.block_size = block_size
        self.kv_cache = torch.zeros(
            kv_shape(model, num_blocks, block_size), dtype=model.dtype, device=model.device
        )

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that change hands. On a CPU attention multiplies what it masks by 0, which
        leaves a NaN of the previous owner a NaN; the kernels do not load it in the first place."""
        if not use_triton(self.kv_cache):
            for block in blocks:
                self.kv_cache[:, :, :, block] = 0
            if self.drafter is not None:
                self.drafter.clear(blocks)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute the K/V of pieces of the rows' prompts."""
        _, input_ids, batch = self._lay_out_chunks(chunks)
        self.model.forward(input_ids, self.kv_cache, batch)

    @torch.inference_mode()
    def draft_prefill(self, chunks: Sequence[Chunk]) -> None:
        """The same for the draft model's cache."""
        assert self.drafter is not None
        self.drafter.prefill(*self._lay_out_chunks(chunks))

    def _lay_out_chunks(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Batch]:
        """The request rows [B] of the chunks, input_ids [T] int32, and the batch."""
        device = self.model.device
        row, start, count = (torch.tensor(column, device=device) for column in zip(*chunks, strict=True))
        total = sum(n for _, _, n in chunks)
        q_start = count.cumsum(0) - count
        b = torch.repeat_interleave(torch.arange(len(chunks), device=device), count, output_size=total)
        positions = torch.arange(total, device=device) - q_start[b] + start[b]
        batch = Batch(
            positions=positions.int(),
            slots=self._slots(row[b], positions),
            block_table=self.state.block_table[row],
            q_start=q_start.int(),
            q_len=count.int(),
            base_len=start.int(),
            max_q_len=max(n for _, _, n in chunks),
            max_kv_len=max(first + n for _, first, n in chunks),
            prefill=True,
        )
        return row, self.state.tokens[row[b], positions], batch

    @torch.inference_mode()
    def packed_step(
        self, rows: Sequence[int], k: int, passes: int, max_kv_len: int, policy: Policy
    ) -> StepResult:
        """A step of these request rows with at most `k` drafts each, as many as `policy` allows.

        `passes`: the most drafts that a model may be run for. `max_kv_len`: an upper bound of the rows'
        tokens + k.
        """
        state = self.state
        with self.metrics.stage("propose"):
            running = torch.tensor(rows, dtype=torch.int32, device=self.model.device)
            running.masked_fill_(state.finished[running.long()] != RUNNING, -1)
            if not bool((running >= 0).any()):  # all have ended, and the host will soon know
                nobody = torch.zeros(len(rows), NUM_COLUMNS, dtype=torch.int32)
                logits = torch.zeros(0, self.model.config.vocab_size)
                return StepResult(nobody, nobody, nobody[:, 0], logits)
            proposal = self._propose(running, k, passes, max_kv_len)
            if k:
                by_row = (proposal.drafter, proposal.num_drafts, proposal.match_len)
                taken = running.new_tensor(policy.cut(rows, *(column.tolist() for column in by_row)))
                proposal = proposal._replace(num_drafts=taken)
            running, input_ids, batch = self._lay_out(running, proposal, k)
            input_ids, batch = pack(input_ids, batch, max_kv_len)
        return self._score(running, proposal, batch, input_ids)

    @torch.inference_mode()
    def padded_step(self, rows: Tensor, k: int) -> StepResult:
        """A step of `rows` [B] int32, -1 for padding, with `k` + 1 tokens each. Never waits for the
        device, so it can be captured."""
        proposal = self._propose(rows, k, k, self.state.tokens.shape[1])
        running, input_ids, batch = self._lay_out(rows, proposal, k)
        return self._score(running, proposal, batch, input_ids)

    def _lay_out(self, rows: Tensor, proposal: Proposal, k: int) -> tuple[Tensor, Tensor, Batch]:
        s = self.state
        return lay_out(
            rows, proposal, s.tokens, s.num_tokens, s.finished, s.block_table, self.block_size, k
        )

    def _score(self, rows: Tensor, proposal: Proposal, batch: Batch, input_ids: Tensor) -> StepResult:
        """Forward, verify, commit."""
        state = self.state
        with self.metrics.stage("forward"):
            hidden = self.model.forward(input_ids, self.kv_cache, batch)
            logits = self.model.logits(hidden)
        with self.metrics.stage("verify"):
            targets = sample(logits, input_ids, rows, state.params, batch)
            if self.simulation is not None:
                targets = self.simulation.targets(targets, input_ids, rows, batch)
            elif not self.exact and batch.max_q_len > 1:
                drawn = proposal.drafter == MODEL
                targets = accept(
                    targets, logits, input_ids, rows, state.params, batch, state.rule, batch.parents,
                    proposal.logits, drawn,
                )  # fmt: skip
            verdict, kept = verify_and_commit(
                targets,
                input_ids,
                batch,
                batch.parents,
                state.tokens,
                state.num_tokens,
                state.params.output_counts,
                state.finished,
                rows,
                state.max_len,
                state.params.stop_ids,
            )
            if batch.parents is not None:
                kv_move(self.kv_cache, verdict.path, verdict.num_emitted, batch)
            if self.drafter is not None:
                self.drafter.learn(state, rows, proposal, hidden, batch, verdict)
            table = report(rows, batch.q_len, proposal, verdict, kept, state.finished)
            return StepResult(table, verdict.path, batch.q_start, logits)

    def fetch(self, result: StepResult) -> Callable[[], list[list[int]]]:
        """Start copying the result's table to the host; the function returned waits for it.

        The copy is queued behind the step, so the next step may reuse the result's memory.
        """
        table = result.table
        if not table.is_cuda:
            lines = table.tolist()
            return lambda: lines
        pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        pinned.copy_(table, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[list[int]]:
            arrived.synchronize()
            lines: list[list[int]] = pinned.tolist()
            return lines

        return wait

    @torch.inference_mode()
    def logprobs(self, result: StepResult, wanted: Sequence[int]) -> Logprobs:
        """Log-probabilities of the kept tokens of each row b with wanted[b] >= 0, and of the wanted[b]
        likeliest (the largest of these numbers for all). Waits for the step."""
        table, Q = result.table, result.path.shape[1]
        tokens = result.table[:, NUM_COLUMNS : NUM_COLUMNS + Q]
        place = torch.arange(Q, device=table.device)
        asked = torch.tensor(wanted, device=table.device) >= 0
        b, j = ((place < table[:, :1]) & asked[:, None]).nonzero(as_tuple=True)
        index = result.q_start[b] + result.path[b, j]
        return logprobs(result.logits, index, tokens[b, j], max(wanted))

    @contextmanager
    def rehearsal(self, count: int, context: int) -> Iterator[None]:
        """Fill the first `count` request rows for timing, see `State.rehearsal`."""
        with self.state.rehearsal(count, context, self.kv_cache.shape[3]):
            if self.drafter is not None:
                self.drafter.rehearse(self.state, count)
            yield

    def measure_cost(self) -> StepCosts:
        """Time the forward pass by the number of tokens scored. Writes nothing to the cache."""
        return forward_cost(self.model, self.kv_cache, self.state.block_table, self.block_size)

    def _propose(self, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        if self.drafter is None or k == 0:
            return nothing(rows, 0)
        return self.drafter.propose(self.state, rows, k, passes, max_kv_len)

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        """Cache slots of positions [...] of request rows [...], int32."""
        block = self.state.block_table[row, position // self.block_size]
        return (block * self.block_size + position % self.block_size).int()

