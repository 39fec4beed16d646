"""Capture the step once per bucket and replay it: on a GPU, as one CUDA graph per (batch size, K).

The inputs and outputs of a bucket are tensors at fixed addresses. The only input is the list of request rows,
padded with -1 to the bucket's batch size. All buckets share one tensor for it, which is sent to the device
when it changes. The step reads everything else from the request rows (`kernels/table.py`), so no value
computed on the host is baked into a capture. Padding rows have no effect. Captures never run concurrently, so
they share memory: one pool per engine, as large as the largest capture needs, and one buffer for the logits.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..drafters.policy import Choice
from ..kernels.transfer import upload
from .extension import Extension
from .step import StepResult

MAX_STEP_TOKENS = 1024  # per bucket; launch overhead is negligible in larger steps
KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # captured, up to the maximum K of the engine
PADDING = -1


class Bucket(NamedTuple):
    """A batch size, a speculation length, and the extensions requested by some of the rows."""

    batch_size: int
    k: int
    extensions: tuple[Extension, ...] = ()


class EagerCapture:
    """Runs the step again for each replay, so that all but the graphs can be tested without a GPU."""

    def __init__(self, step: Callable[[], StepResult]) -> None:
        self._step, self.result = step, step()

    def replay(self) -> None:
        self.result = self._step()


class CudaCapture:
    """Captures the step as a CUDA graph, in memory from `pool`. Keep the pool alive as long as the graph."""

    def __init__(self, step: Callable[[], StepResult], pool: Any) -> None:
        # Compile the kernels and allocate what lasts longer than a step, neither of which can be captured.
        for _ in range(2):
            step()
        self.graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as NCCL's watchdog, may call CUDA during the capture.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = step()
        self.replay = self.graph.replay


class StepGraphs:
    """The captures of all buckets of a step. `batch_sizes` and `ks` are ascending; not all of their pairs are
    buckets, see `ks_for`. A bucket scores at most `max_tokens` tokens."""

    def __init__(
        self,
        step: Callable[..., StepResult],
        device: torch.device,
        max_batch: int,
        ks: Sequence[int],
        lazy: bool = False,
    ) -> None:
        self.step, self.device, self.lazy = step, device, lazy
        self.ks, self.batch_sizes = sorted({0, *ks}), batch_sizes(max_batch)
        self.captures: dict[Bucket, EagerCapture | CudaCapture] = {}
        self.rows = torch.full((max_batch,), PADDING, dtype=torch.int32, device=device)
        self._sent: list[int] = []  # rows on the device, [] if unknown
        self.replays: Counter[tuple[int, int]] = Counter()  # by (batch size, K)
        self.max_tokens = max(bucket.batch_size * (bucket.k + 1) for bucket in self.buckets())
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def buckets(self) -> list[Bucket]:
        """Return all buckets, largest first, so that the later ones fit in the pool."""
        buckets = [Bucket(b, k) for b in self.batch_sizes for k in self.ks_for(b)]
        return sorted(buckets, key=lambda bucket: (-bucket.batch_size * (bucket.k + 1), bucket))

    def ks_for(self, batch: int) -> list[int]:
        """Return the speculation lengths captured for a batch: 0 and those within MAX_STEP_TOKENS."""
        size = self.batch_sizes[bisect_left(self.batch_sizes, batch)]
        return [k for k in self.ks if k == 0 or size * (k + 1) <= MAX_STEP_TOKENS]

    def bucket_for(self, num_rows: int, k: int, extensions: tuple[Extension, ...] = ()) -> Bucket:
        """Return the bucket with the smallest batch size for `num_rows` rows and the largest K up to `k`."""
        batch = self.batch_sizes[bisect_left(self.batch_sizes, num_rows)]
        return Bucket(batch, max(length for length in self.ks_for(batch) if length <= k), extensions)

    def capture_all(self) -> None:
        for bucket in tqdm(self.buckets(), desc="Capturing steps", disable=None, leave=False):
            self.capture(bucket)

    def capture(self, bucket: Bucket) -> EagerCapture | CudaCapture:
        """Capture a bucket, with padding rows only, because capturing runs the step."""
        self._sent, rows = [], self.rows[: bucket.batch_size].fill_(PADDING)
        step = partial(self.step, rows, Choice(bucket.k), bucket.extensions)
        capture = EagerCapture(step) if self._pool is None else CudaCapture(step, self._pool)
        self.captures[bucket] = capture
        return capture

    def run(self, rows: list[int], bucket: Bucket) -> StepResult:
        """Replay a bucket for `rows`, at most its batch size. The next replay overwrites the result."""
        capture = self.captures.get(bucket) or self.capture(bucket)  # new if lazy or with extensions
        self.replays[bucket.batch_size, bucket.k] += 1
        self.send(rows + [PADDING] * (bucket.batch_size - len(rows)))
        capture.replay()
        B, (report, path, q_start, logits) = len(rows), capture.result
        return StepResult(report[:B], path[:B], q_start[:B], logits)

    def send(self, rows: list[int]) -> None:
        """Copy `rows` to the beginning of `self.rows`, unless they are there already."""
        if rows != self._sent[: len(rows)]:
            self._sent = []  # unknown if the copy is interrupted
            upload(rows, torch.int32, self.device, out=self.rows[: len(rows)])
            self._sent = rows


def batch_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, 8, then two per power of two (12, 16, 24, 32, 48, ...), up to `largest`."""
    sizes = [1, 2, 4, *(base << i for i in range(largest.bit_length()) for base in (8, 12))]
    return [size for size in sizes if size < largest] + [largest]
