"""The device side: request rows, model, KV caches, drafters and captured steps. The main calls:

    admit     write a request and its blocks to a row
    prefill   compute the K/V of prompt chunks
    step      queue the speculative step (`step.py`) for some rows
    fetch     wait for a queued step and return its results
    release   empty a row

They are called by the host (`engine.py`), which does not compute with tensors. Arguments are plain data
(`messages.py`), so that the same calls can be sent to several workers. The exception is the pending step
passed to `fetch`.
"""

from collections.abc import Sequence

import torch

from ..config import EngineConfig
from ..drafters import Drafter
from ..drafters.estimates import StepCosts
from ..drafters.methods import captures_steps
from ..kernels import NO_DRAFTER, STOPPED
from ..kernels.batch import Batch, Chunk
from ..kernels.launch import use_triton
from ..kernels.speculation.report import kept_logprobs
from ..kernels.speculation.trim import Estimates
from ..kernels.table import Table
from ..kernels.transfer import to_host, upload, write
from ..models.decoder import Model
from ..models.warm_up import warm_up
from .extension import Extension
from .graphs import KS, StepGraphs
from .hardware import with_device
from .memory import max_drafts, plan_cache, used_memory
from .messages import Admission, PendingStep, RowResult, StepInput
from .rows import write_row
from .step import Step
from .timing import Barrier, step_costs


class Worker:
    """Runs a model on one device."""

    failure: str | None = None  # the reason if the worker can no longer run
    graphs: StepGraphs | None = None  # None if steps are not captured (they may then wait for the device)

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        drafters: Sequence[Drafter] = (),
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.config, self.model, self.device = config, model, model.device
        self.drafters, self.extensions = drafters, extensions
        # Names of the drafters, then of extensions that draft, indexed by `RowReport.drafter`.
        names = (drafter.name for drafter in drafters)
        self.drafter_names = *names, *(n for each in extensions if (n := each.drafter_name) is not None)
        self._build()

    @with_device
    def _build(self) -> None:
        """Allocate rows and caches, and capture the steps."""
        config, model = self.config, self.model
        self.max_k = min(config.spec.max_k, max_drafts(self.drafters))  # the largest K of any step
        self.num_blocks, self.max_model_len = self._plan_cache()
        self.table = Table.empty(
            config.max_num_seqs, self.max_model_len, config.block_size, model.config.vocab_size, model.device
        )
        self.kv_cache = model.allocate_kv_cache(self.num_blocks, config.block_size)
        captured = captures_steps(config, model, self.drafters)
        # The index in `drafter_names` of the drafter that runs a model; NO_DRAFTER if there is none.
        codes = [code for code, drafter in enumerate(self.drafters) if drafter.runs_model]
        self.model_drafter = max(codes, default=NO_DRAFTER)
        for drafter in self.drafters:
            drafter.attach(self.table, self.num_blocks, config.max_num_batched_tokens)
        # Bytes in use by purpose, for each device of the model.
        self.memory = [used_memory(model, self.drafters, self.table, self.num_blocks)]
        exact = config.spec.acceptance == "exact"
        estimates = None
        if config.spec.num_speculative_tokens == "auto" and self.max_k:
            num_drafters = max(len(self.drafter_names), 1)
            self._estimates, estimates = Estimates.empty(num_drafters, config.max_num_seqs, model.device)
        self._step = Step(model, self.kv_cache, self.table, self.drafters, self.extensions, exact, estimates)
        self.stages = self._step.stages
        for extension in self.extensions:
            extension.attach(self)
        if captured:
            ks = [*(k for k in KS if k < self.max_k), self.max_k]
            self.graphs = StepGraphs(self._step, model.device, config.max_num_seqs, ks, config.lazy_capture)
            self._step.share_logits(self.graphs.max_tokens)
            if not config.lazy_capture:
                warm_up(model, self.table, config.max_num_batched_tokens, self._step.prefill)
                self.graphs.capture_all()

    def _plan_cache(self) -> tuple[int, int]:
        """Return (number of KV cache blocks, max_model_len), the minimum over all devices of the model."""
        return plan_cache(self.config, self.model, self.drafters)

    def close(self) -> None:
        """Do nothing. The worker of a split model shuts down its processes (`extras/tensor_parallel`)."""

    @with_device
    def admit(self, request: Admission) -> None:
        write_row(self.table, request, self.config.spec)
        for extension in self.extensions:
            extension.admit(request.row)
        self._set_blocks(request.row, len(request.tokens), request.blocks, request.num_cached)

    def _set_blocks(self, row: int, num_tokens: int, blocks: list[int], num_kept: int) -> None:
        """Set the blocks of a row, which are new from index `num_kept` on. The last block is repeated to the
        end of the block table, so that masked reads there never access blocks of other requests."""
        write(self.table.block_table, row, blocks, end=self.table.max_blocks)
        for drafter in self.drafters:
            drafter.admit(row, num_tokens, blocks, num_kept)

    @with_device
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        with self.stages["prefill"]:
            self._step.prefill(Batch.from_chunks(self.table, chunks))

    @with_device
    @torch.inference_mode()
    def step(self, inputs: StepInput) -> PendingStep:
        """Queue a step."""
        for row_blocks in inputs.new_blocks:
            self._set_blocks(*row_blocks)
        rows, num_top, graphs, choice = inputs.rows, inputs.logprobs, self.graphs, inputs.choice
        requested = {each: v for each, v in zip(self.extensions, inputs.extra, strict=True) if v is not None}
        bucket = None if graphs is None else graphs.bucket_for(len(rows), choice.k, tuple(requested))
        for extension, value in requested.items():
            extension.send(value, bucket.k if bucket else choice.k)
        if numbers := choice.estimates:
            upload(numbers, torch.float32, self.device, out=self._estimates[: len(numbers)])
        if use_triton(self.kv_cache):  # on a CPU, the step does this for the rows that a drafter drafts for
            with self.stages["propose"]:
                for drafter in self.drafters:
                    drafter.catch_up(inputs.drafting)
        if graphs is None or bucket is None:
            on_device = torch.tensor(rows, dtype=torch.int32, device=self.device)
            result = self._step(on_device, choice, tuple(requested))
        else:
            result = graphs.run(rows, bucket)
        logprobs = kept_logprobs(*result, num_top) if max(num_top) >= 0 else None
        return PendingStep(to_host(result.report), logprobs, num_top)

    @with_device
    def fetch(self, pending: PendingStep) -> list[RowResult]:
        """Wait for a step and return a result for each of its rows."""
        with self.stages["wait"]:
            return pending.results()

    @with_device
    def release(self, row: int) -> None:
        """Empty the row of a finished or preempted request, whose blocks may already be reused."""
        self.table.finished[row].fill_(STOPPED)
        for drafter in self.drafters:
            drafter.release(row)

    @with_device
    def measure(self, barrier: Barrier = lambda: None) -> StepCosts:
        """Time steps of all sizes, before the first request. `barrier` synchronizes all ranks, if several."""
        return step_costs(self._step, self.max_k, self.graphs, self.num_blocks, barrier)
