"""The step, captured once per bucket and replayed: on a GPU one CUDA graph per (batch size, K).

A bucket's inputs and outputs are tensors at fixed addresses. The only input is which request rows take
part, padded with -1 to the bucket's size, the beginning of a tensor that all buckets share: it is sent
when it changes. All else the step reads from the request rows (`kernels/table.py`), so nothing computed on
the host is frozen into a capture. Padding rows are inert. Captures never run at the same time, so they
share their memory: one pool for all of an engine, which holds what the largest of them needs, and one
buffer for the logits (`Step.share_logits`). What is read of a result must be queued before the next replay.

On a CPU a capture is the step itself, run again at every replay, with results copied to the same
addresses: so that buckets, padding and the reuse of outputs are tested without a GPU.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from ..kernels.transfer import upload
from .step import StepResult

MAX_STEP_TOKENS = 1024  # of a bucket; longer steps are bound by computing, which a graph does not help
PADDING = -1

Step = Callable[[Tensor], StepResult]


class Bucket(NamedTuple):
    """A batch size and a speculation length."""

    batch: int
    k: int


class Capture(Protocol):
    """A step at fixed addresses."""

    rows: Tensor
    result: StepResult

    def replay(self) -> None: ...


class EagerCapture:
    """Runs the step again at every replay."""

    def __init__(self, step: Step, rows: Tensor) -> None:
        self.rows, self._step = rows, step
        self.result = step(rows)

    @torch.inference_mode()
    def replay(self) -> None:
        for kept, new in zip(self.result, self._step(self.rows), strict=True):
            kept.copy_(new)


class CudaCapture:
    """Captures the step as a CUDA graph, whose memory is of a `pool` that lives as long as its captures."""

    def __init__(self, step: Step, rows: Tensor, pool: Any = None) -> None:
        self.rows = rows
        # Compile and allocate before capture: on this stream, since all engines share the kernels' tickets.
        for _ in range(2):
            step(rows)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may go on, that of NCCL which looks after collectives among them.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = step(rows)

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs:
    """All captured buckets of a step.

    Attributes:
        batches, ks: sizes for which buckets exist, ascending. Not every pair does, see `ks_for`.
        captures: by bucket.
        replays: steps by bucket.
        fallbacks: steps whose bucket was not captured when it was needed. Stays 0; where captures are `lazy`,
            and for variants of the step, they are made then.
        seconds, bytes: what capture took.
    """

    def __init__(
        self,
        step: Callable[[Tensor, int], StepResult],
        device: torch.device,
        max_batch: int,
        ks: Sequence[int],
        lazy: bool = False,
    ) -> None:
        self.step, self.device = step, device
        self.ks = sorted({0, *ks})
        self.batches = batch_sizes(max_batch)
        self.captures: dict[Bucket, Capture] = {}
        self._variants: dict[Hashable, dict[Bucket, Capture]] = {None: self.captures}
        self.rows = torch.full((max_batch,), PADDING, dtype=torch.int32, device=device)
        self._sent: list[int] = []  # what `rows` begins with, as far as is known
        self.replays: Counter[Bucket] = Counter()
        self.fallbacks = 0
        self.lazy = lazy
        self.seconds, self.bytes = 0.0, 0
        self._make: Callable[[Step, Tensor], Capture] = EagerCapture
        if device.type == "cuda":
            self._make = partial(CudaCapture, pool=torch.cuda.graph_pool_handle())

    def buckets(self) -> list[Bucket]:
        """All buckets, the largest first, so that the pool fits those that follow."""
        found = [Bucket(b, k) for b in self.batches for k in self.ks_for(b)]
        return sorted(found, key=lambda bucket: (-bucket.batch * (bucket.k + 1), bucket))

    def ks_for(self, batch: int) -> list[int]:
        """The speculation lengths captured for a batch: 0, and those that may pay."""
        size = self.batches[bisect_left(self.batches, batch)]
        return [k for k in self.ks if k == 0 or size * (k + 1) <= MAX_STEP_TOKENS]

    @property
    def max_tokens(self) -> int:
        """How many tokens the largest step scores."""
        return max(bucket.batch * (bucket.k + 1) for bucket in self.buckets())

    def capture_all(self, variant: Hashable = None) -> None:
        """Capture every bucket of the step as it is now, which is this variant."""
        start, before = time.perf_counter(), _allocated(self.device)
        captures = self._variants.setdefault(variant, {})
        for bucket in tqdm(self.buckets(), desc="Capturing steps", disable=None, leave=False):
            captures[bucket] = self._record(bucket)
        self.seconds += time.perf_counter() - start
        self.bytes += _allocated(self.device) - before

    def clear(self) -> None:
        """Free all captures."""
        for captures in self._variants.values():
            captures.clear()

    def run(self, rows: Sequence[int], k: int, variant: Hashable = None) -> StepResult:
        """Replay the step of the smallest bucket that holds `rows`, with at most `k` drafts each. A variant
        of the step, which does more for some rows, is captured when it is first needed.

        The result's tensors are overwritten by the next replay of the same bucket.
        """
        bucket = self.bucket_for(len(rows), k)
        captures = self._variants.setdefault(variant, {})
        capture = captures.get(bucket)
        if capture is None:
            self.fallbacks += not self.lazy and variant is None
            capture = captures[bucket] = self._record(bucket)
        self.replays[bucket] += 1
        self._send([*rows, *[PADDING] * (bucket.batch - len(rows))])
        capture.replay()
        return capture.result.first(len(rows))

    def _send(self, rows: list[int]) -> None:
        """Have `rows` begin with these."""
        if rows != self._sent[: len(rows)]:
            self.forget_rows()  # in case this is interrupted
            upload(rows, torch.int32, self.device, out=self.rows[: len(rows)])
            self._sent = rows

    def forget_rows(self) -> None:
        """Somebody else has written to them."""
        self._sent = []

    def bucket_for(self, num_rows: int, k: int) -> Bucket:
        """The smallest bucket of at least `num_rows` rows, with the largest captured K up to `k`."""
        batch = self.batches[bisect_left(self.batches, num_rows)]
        return Bucket(batch, max(length for length in self.ks_for(batch) if length <= k))

    def capture(self, bucket: Bucket) -> Capture:
        """Capture one bucket."""
        self.captures[bucket] = self._record(bucket)
        return self.captures[bucket]

    def _record(self, bucket: Bucket) -> Capture:
        self.forget_rows()
        rows = self.rows[: bucket.batch].fill_(PADDING)  # nobody's, as capturing runs the step
        return self._make(lambda r: self.step(r, bucket.k), rows)


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then in steps of half the power of two below (12, 16, 24, 32, 48), up to `largest`."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        step = max(1 << (sizes[-1].bit_length() - 1) >> 1, 1)
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
