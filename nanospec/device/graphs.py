"""The step, captured once per bucket and replayed: on a GPU one CUDA graph per (batch size, K).

A bucket's inputs and outputs are tensors at fixed addresses. The only input is which request rows take
part, padded with -1 to the bucket's size: the first entries of one tensor that all buckets share, sent when
they change. All else the step reads from the request rows (`kernels/table.py`), so nothing computed on the
host is frozen into a capture. Padding rows are inert. Captures never run at the same time, so they share
their memory: one pool for all of an engine, which holds what the largest of them needs, and one buffer for
the logits (`Step.share_logits`). What is read of a result must be queued before the next replay.

On a CPU a capture is the step itself, run again at every replay, with results copied to the same
addresses: so that buckets, padding and the reuse of outputs are tested without a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..kernels.transfer import upload
from .extension import Extension
from .step import StepResult

MAX_STEP_TOKENS = 1024  # per bucket; in larger steps the time of launches does not matter
KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # captured, as far as the largest K of the engine allows
PADDING = -1


class Bucket(NamedTuple):
    """A batch size and a speculation length; the extensions that some of its rows ask for."""

    batch: int
    k: int
    extensions: tuple[Extension, ...] = ()


class EagerCapture:
    """Runs the step again at every replay."""

    def __init__(self, step: Callable[[], StepResult]) -> None:
        self._step, self.result = step, step()

    @torch.inference_mode()
    def replay(self) -> None:
        for kept, new in zip(self.result, self._step(), strict=True):
            kept.copy_(new)


class CudaCapture:
    """Captures the step as a CUDA graph, in memory of a `pool` that must outlive it."""

    def __init__(self, step: Callable[[], StepResult], pool: Any) -> None:
        # Compile and allocate before capture: on this stream, since engines share `launch.tickets`.
        for _ in range(2):
            step()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads must be able to run, NCCL's watchdog among them.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = step()
        self.replay = self.graph.replay


class StepGraphs:
    """All captured buckets of a step.

    Attributes:
        batches, ks: sizes for which buckets exist, ascending. Not every pair does, see `ks_for`.
        captures: by bucket.
        replays: steps by batch size and K.
        max_tokens: the most tokens that a step scores.
    """

    def __init__(
        self,
        step: Callable[..., StepResult],
        device: torch.device,
        max_batch: int,
        ks: Sequence[int],
        lazy: bool = False,
    ) -> None:
        self.step, self.device, self.lazy = step, device, lazy
        self.ks, self.batches = sorted({0, *ks}), batch_sizes(max_batch)
        self.captures: dict[Bucket, EagerCapture | CudaCapture] = {}
        self.rows = torch.full((max_batch,), PADDING, dtype=torch.int32, device=device)
        self._sent: list[int] = []  # the rows sent last, [] if unknown
        self.replays: Counter[tuple[int, int]] = Counter()
        self.max_tokens = max(bucket.batch * (bucket.k + 1) for bucket in self.buckets())
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def buckets(self) -> list[Bucket]:
        """Return all buckets, the largest first, so that the pool fits those that follow."""
        buckets = [Bucket(b, k) for b in self.batches for k in self.ks_for(b)]
        return sorted(buckets, key=lambda bucket: (-bucket.batch * (bucket.k + 1), bucket))

    def ks_for(self, batch: int) -> list[int]:
        """Return the speculation lengths captured for a batch: 0, and those of at most MAX_STEP_TOKENS."""
        size = self.batches[bisect_left(self.batches, batch)]
        return [k for k in self.ks if k == 0 or size * (k + 1) <= MAX_STEP_TOKENS]

    def bucket_for(self, num_rows: int, k: int, extensions: tuple[Extension, ...] = ()) -> Bucket:
        """Return the smallest bucket of at least `num_rows` rows, with the largest captured K up to `k`."""
        batch = self.batches[bisect_left(self.batches, num_rows)]
        return Bucket(batch, max(length for length in self.ks_for(batch) if length <= k), extensions)

    def capture_all(self) -> None:
        """Capture the step for every batch size and K."""
        for bucket in tqdm(self.buckets(), desc="Capturing steps", disable=None, leave=False):
            self.capture(bucket)

    def capture(self, bucket: Bucket) -> EagerCapture | CudaCapture:
        """Capture a bucket, of padding rows only, as capturing runs the step."""
        self._sent, rows = [], self.rows[: bucket.batch].fill_(PADDING)
        step = partial(self.step, rows, bucket.k, bucket.extensions)
        capture = EagerCapture(step) if self._pool is None else CudaCapture(step, self._pool)
        self.captures[bucket] = capture
        return capture

    def run(self, rows: list[int], bucket: Bucket) -> StepResult:
        """Replay the step of a bucket for at most as many `rows`. The result's tensors are overwritten by its
        next replay."""
        capture = self.captures.get(bucket) or self.capture(bucket)  # first use: lazy, or with extensions
        self.replays[bucket.batch, bucket.k] += 1
        self.send(rows + [PADDING] * (bucket.batch - len(rows)))
        capture.replay()
        B, (report, path, q_start, logits) = len(rows), capture.result
        return StepResult(report[:B], path[:B], q_start[:B], logits)

    def send(self, rows: list[int]) -> None:
        """Make `self.rows` begin with these, if it does not."""
        if rows != self._sent[: len(rows)]:
            self._sent = []  # in case the copy is interrupted
            upload(rows, torch.int32, self.device, out=self.rows[: len(rows)])
            self._sent = rows


def batch_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, 8, then two per power of two (12, 16, 24, 32, 48, ...), up to `largest`."""
    sizes = [1, 2, 4, *(base << i for i in range(largest.bit_length()) for base in (8, 12))]
    return [size for size in sizes if size < largest] + [largest]
