"""What the device does: fill the cache with prompts, and the speculative step.

    propose -> forward -> verify -> commit

The step reads and writes `State` only. On a CPU it runs eagerly on *packed* rows, so a row without
drafts costs one token; with `uniform=True` it pads every row to K+1 tokens, the form that a captured
graph needs (see `kernels/rows.py`).
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from .drafters import NgramDrafter
from .kernels.commit import commit
from .kernels.ngram import Proposal
from .kernels.rows import Rows
from .kernels.sample import logprobs, sample
from .kernels.verify import verify
from .metrics import Metrics
from .model import Model
from .policy import CostTable, Policy
from .state import State

COST_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per step at which the cost is measured
COST_REPEATS = 3


class StepResult(NamedTuple):
    """What a step of B rows with at most K drafts gave, on the device.

    Attributes:
        emitted: [B, Q] int32, Q <= K + 1; the target's tokens, of which the first `kept` count.
        kept: [B] int32, committed tokens.
        num_drafts, num_accepted: [B] int32; accepted may exceed kept at a stop.
        source, match_len: [B] int32, where the drafts came from, -1 and 0 without a match.
        finished: [B] int8, codes of `kernels.commit`.
        logprobs: of every emitted token of rows that asked: (own [N], their rank [N], top values
            [N, n], top ids [N, n]) in order of row and place, or None.
    """

    emitted: Tensor
    kept: Tensor
    num_drafts: Tensor
    num_accepted: Tensor
    source: Tensor
    match_len: Tensor
    finished: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None


class Runner:
    """The model, its KV cache and the device rows."""

    def __init__(
        self,
        model: Model,
        state: State,
        num_blocks: int,
        block_size: int,
        drafter: NgramDrafter | None,
        policy: Policy,
        metrics: Metrics,
    ) -> None:
        self.model, self.state = model, state
        self.drafter, self.policy, self.metrics = drafter, policy, metrics
        self.block_size = block_size
        self.kv_cache = torch.zeros(
            kv_shape(model, num_blocks, block_size), dtype=model.dtype, device=model.device
        )

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
        )
        self.model.forward(self.state.tokens[row[b], positions], self.kv_cache, batch)

    @torch.inference_mode()
    def step(
        self,
        rows: Tensor,
        k: int,
        max_kv_len: int,
        num_logprobs: Tensor | None = None,
        uniform: bool = False,
    ) -> StepResult:
        """One speculative step.

        Args:
            rows: [B] int32, the request row of each batch row; -1 is padding.
            k: the most drafts per row.
            max_kv_len: an upper bound of tokens + k over the rows.
            num_logprobs: [B] int32, how many likeliest tokens to report, -1 for none; None: no row
                wants any.
            uniform: pad all rows to k + 1 tokens.
        """
        state, stage = self.state, self.metrics.stage
        with stage("propose"):
            proposal = self._propose(rows, k)
            batch, input_ids = self._batch(rows, proposal, max_kv_len, k if uniform else None)
        with stage("forward"):
            logits = self.model.logits(self.model.forward(input_ids, self.kv_cache, batch))
        with stage("verify"):
            targets = sample(logits, input_ids, rows, state.params, batch)
            verdict = verify(targets, input_ids, batch)
            kept = commit(
                state.tokens,
                state.num_tokens,
                state.params.output_counts,
                state.finished,
                rows,
                verdict.emitted,
                verdict.num_emitted,
                state.max_len,
                state.params.stop_ids,
            )
            return StepResult(
                verdict.emitted,
                kept,
                (batch.q_len - 1).clamp(min=0),
                (verdict.num_emitted - 1).clamp(min=0),
                proposal.source,
                proposal.match_len,
                state.finished[rows.clamp(min=0).long()],
                self._logprobs(logits, verdict.emitted, verdict.path, kept, num_logprobs, batch),
            )

    @torch.inference_mode()
    def measure_cost(self) -> CostTable:
        """Time the forward pass by the number of tokens scored. Writes nothing to the cache."""
        zeros = torch.zeros(COST_SIZES[-1], dtype=torch.int32, device=self.model.device)
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
                    max_kv_len=n,
                )
                start = time.perf_counter()
                self.model.logits(self.model.forward(zeros[:n], self.kv_cache, batch))
                times[-1] = min(times[-1], (time.perf_counter() - start) * 1e3)
        return CostTable(list(COST_SIZES), times)

    def _propose(self, rows: Tensor, k: int) -> Proposal:
        if self.drafter is None or k == 0:
            none = torch.zeros_like(rows)
            return Proposal(none.new_zeros(len(rows), 0), none, none - 1, none)
        proposal = self.drafter.propose(self.state, rows, k)
        return proposal._replace(num_drafts=self.policy.limit(rows, proposal))

    def _batch(
        self, rows: Tensor, proposal: Proposal, max_kv_len: int, pad_to: int | None
    ) -> tuple[Rows, Tensor]:
        """Lay out each row's last token and its drafts; returns the batch and input_ids [T] int32."""
        state, device = self.state, rows.device
        index = rows.clamp(min=0).long()
        num_tokens = state.num_tokens[index]
        q_len = torch.where(rows >= 0, proposal.num_drafts + 1, 0)
        max_q_len = pad_to + 1 if pad_to is not None else max(int(q_len.max()), 1)
        place = torch.arange(max_q_len, device=device)
        last = state.tokens[index, (num_tokens - 1).clamp(min=0).long()]
        ids = torch.cat((last[:, None], proposal.drafts), 1)[:, :max_q_len]  # [B, Q]
        base = (num_tokens - 1).clamp(min=0)
        positions = base[:, None] + place  # [B, Q]
        valid = place < q_len[:, None]
        if pad_to is None:
            if max_q_len > 1 or len(rows) > 1:
                ids, positions, b = ids[valid], positions[valid], valid.nonzero()[:, 0]
            else:
                ids, positions, b = ids[0], positions[0], torch.zeros(1, dtype=torch.long)
            q_start = q_len.cumsum(0) - q_len
            slots = self._slots(index[b], positions)
        else:
            q_start = torch.arange(len(rows), device=device) * max_q_len
            b = index[:, None].expand_as(positions)
            slots = torch.where(valid, self._slots(b, torch.where(valid, positions, 0)), -1).flatten()
            ids = torch.nn.functional.pad(ids, (0, max_q_len - ids.shape[1])).flatten()
            positions = torch.where(valid, positions, 0).flatten()
        batch = Rows(
            positions=positions.int(),
            slots=slots.int(),
            block_table=state.block_table[index],
            q_start=q_start.int(),
            q_len=q_len.int(),
            base_len=base,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
        )
        return batch, ids

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        """Cache slots of positions [...] of request rows [...], int32."""
        block = self.state.block_table[row, position // self.block_size]
        return (block * self.block_size + position % self.block_size).int()

    def _logprobs(
        self,
        logits: Tensor,
        emitted: Tensor,
        path: Tensor,
        kept: Tensor,
        num_logprobs: Tensor | None,
        batch: Rows,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        if num_logprobs is None:
            return None
        place = torch.arange(emitted.shape[1], device=emitted.device)
        b, j = ((place < kept[:, None]) & (num_logprobs >= 0)[:, None]).nonzero(as_tuple=True)
        scores = logits[batch.q_start[b].long() + path[b, j]].float()
        own, top, top_ids = logprobs(scores, emitted[b, j], int(num_logprobs.max()))
        chosen = scores.gather(1, emitted[b, j].long()[:, None])
        return own, (scores > chosen).sum(1) + 1, top, top_ids


def kv_shape(model: Model, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """[layers, 2, Hkv, num_blocks, block_size, D]"""
    c = model.config
    return (c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim)
