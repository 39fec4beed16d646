"""What the device does: fill the cache with prompts, and the speculative step.

    propose -> forward -> verify -> commit

The step reads and writes `State` only. It exists in two forms (see `kernels/rows.py`): *padded*, every
row K+1 tokens long and all shapes known beforehand, which is what a recording needs (`graphs.py`); and
*packed*, for a CPU, where a row without drafts costs one token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .drafters import Drafter
from .kernels.commit import RUNNING, verify_and_commit
from .kernels.dispatch import use_triton
from .kernels.layout import NUM_COLUMNS, lay_out, report
from .kernels.logprobs import Logprobs, logprobs
from .kernels.ngram import Proposal
from .kernels.rows import Rows
from .kernels.sample import sample
from .metrics import Metrics
from .model import Model
from .policy import CostTable, Policy
from .simulation import Simulation
from .state import State

COST_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per step at which the cost is measured
COST_REPEATS = 3


class StepResult(NamedTuple):
    """What a step of B rows gave, on the device.

    Attributes:
        table: [B, 6 + Q] int32, see `kernels/layout.py`. At a stop more drafts may be accepted than kept.
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
    ) -> None:
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

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[int, int, int]]) -> None:
        """Compute the K/V of (row, first token, number of tokens) chunks of the rows' prompts."""
        device = self.model.device
        row, start, count = (torch.tensor(column, device=device) for column in zip(*chunks, strict=True))
        total = sum(n for _, _, n in chunks)
        q_start = count.cumsum(0) - count
        b = torch.repeat_interleave(torch.arange(len(chunks), device=device), count)
        positions = torch.arange(total, device=device) - q_start[b] + start[b]
        batch = Rows(
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
        self.model.forward(self.state.tokens[row[b], positions], self.kv_cache, batch)

    @torch.inference_mode()
    def packed_step(self, rows: Sequence[int], k: int, max_kv_len: int, policy: Policy) -> StepResult:
        """A step of these request rows with at most `k` drafts each, as many as `policy` allows.

        `max_kv_len` is an upper bound of the rows' tokens + k.
        """
        with self.metrics.stage("propose"):
            running = torch.tensor(rows, dtype=torch.int32, device=self.model.device)
            running.masked_fill_(self.state.finished[running.long()] != RUNNING, -1)
            if not bool((running >= 0).any()):  # all have ended, and the host will soon know
                nothing = torch.zeros(len(rows), NUM_COLUMNS, dtype=torch.int32)
                logits = torch.zeros(0, self.model.config.vocab_size)
                return StepResult(nothing, nothing, nothing[:, 0], logits)
            proposal = self._propose(running, k)
            if k:
                proposal = proposal._replace(num_drafts=policy.limit(running, proposal))
            batch, input_ids = self._pack(running, proposal, max_kv_len)
        return self._score(running, proposal, batch, input_ids)

    @torch.inference_mode()
    def padded_step(self, rows: Tensor, k: int) -> StepResult:
        """A step of `rows` [B] int32, -1 for padding, with `k` + 1 tokens each. Never waits for the
        device, so it can be captured."""
        state, proposal = self.state, self._propose(rows, k)
        running, input_ids, batch = lay_out(
            rows,
            proposal,
            state.tokens,
            state.num_tokens,
            state.finished,
            state.block_table,
            self.block_size,
            k,
        )
        return self._score(running, proposal, batch, input_ids)

    def _score(self, rows: Tensor, proposal: Proposal, batch: Rows, input_ids: Tensor) -> StepResult:
        """Forward, verify, commit."""
        state = self.state
        with self.metrics.stage("forward"):
            logits = self.model.logits(self.model.forward(input_ids, self.kv_cache, batch))
        with self.metrics.stage("verify"):
            targets = sample(logits, input_ids, rows, state.params, batch)
            if self.simulation is not None:
                targets = self.simulation.targets(targets, input_ids, rows, batch)
            verdict, kept = verify_and_commit(
                targets,
                input_ids,
                batch,
                None,
                state.tokens,
                state.num_tokens,
                state.params.output_counts,
                state.finished,
                rows,
                state.max_len,
                state.params.stop_ids,
            )
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
        table, tokens = result.table, result.table[:, NUM_COLUMNS:]
        place = torch.arange(tokens.shape[1], device=table.device)
        asked = torch.tensor(wanted, device=table.device) >= 0
        b, j = ((place < table[:, :1]) & asked[:, None]).nonzero(as_tuple=True)
        index = result.q_start[b] + result.path[b, j]
        return logprobs(result.logits, index, tokens[b, j], max(wanted))

    @torch.inference_mode()
    def measure_cost(self) -> CostTable:
        """Time the forward pass by the number of tokens scored. Writes nothing to the cache."""
        zeros = torch.zeros(COST_SIZES[-1], dtype=torch.int32, device=self.model.device)
        window = self.state.block_table.shape[1] * self.block_size
        times = []
        for n in COST_SIZES:
            times.append(math.inf)
            for _ in range(COST_REPEATS):
                batch = Rows(
                    positions=zeros[:n],
                    slots=zeros[:n] - 1,
                    block_table=self.state.block_table[:1],
                    q_start=zeros[:1],
                    q_len=zeros[:1] + n,
                    base_len=zeros[:1],
                    max_q_len=n,
                    max_kv_len=min(n, window),
                )
                start = time.perf_counter()
                self.model.logits(self.model.forward(zeros[:n], self.kv_cache, batch))
                synchronize(self.model.device)
                times[-1] = min(times[-1], (time.perf_counter() - start) * 1e3)
        return CostTable(list(COST_SIZES), times)

    def _propose(self, rows: Tensor, k: int) -> Proposal:
        if self.drafter is None or k == 0:
            none = torch.zeros_like(rows)
            return Proposal(none.new_zeros(len(rows), 0), none, none - 1, none)
        return self.drafter.propose(self.state, rows, k)

    def _pack(self, rows: Tensor, proposal: Proposal, max_kv_len: int) -> tuple[Rows, Tensor]:
        """Lay the rows' last tokens and drafts out back to back: the batch, and input_ids [T] int32."""
        q_len = torch.where(rows >= 0, proposal.num_drafts + 1, 0)
        Q = max(int(q_len.max()), 1)
        index = rows.clamp(min=0).long()
        base = (self.state.num_tokens[index] - 1).clamp(min=0)
        last = self.state.tokens[index, base.long()]
        ids = torch.cat((last[:, None], proposal.drafts), 1)[:, :Q]
        place = torch.arange(Q, device=rows.device)
        valid = place < q_len[:, None]
        b = valid.nonzero()[:, 0]
        positions = (base[:, None] + place)[valid]
        batch = Rows(
            positions=positions.int(),
            slots=self._slots(index[b], positions),
            block_table=self.state.block_table[index],
            q_start=(q_len.cumsum(0) - q_len).int(),
            q_len=q_len.int(),
            base_len=base,
            max_q_len=Q,
            max_kv_len=max_kv_len,
        )
        return batch, ids[valid]

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        """Cache slots of positions [...] of request rows [...], int32."""
        block = self.state.block_table[row, position // self.block_size]
        return (block * self.block_size + position % self.block_size).int()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kv_shape(model: Model, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """[layers, 2, Hkv, num_blocks, block_size, D]"""
    c = model.config
    return (c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim)
