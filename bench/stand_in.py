"""A stand-in for `torch.cuda`, so that benchmarks for a GPU run, without meaning, where there is none.

`install()` replaces what the benchmarks use of it. Events read the host's clock. A graph runs its work
once, when it is captured, and does nothing at a replay. Calls are checked against the signatures of torch's
own functions, so that a wrong argument is found here and not on a machine that is lent for minutes.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SYNC_MODES: list[str] = []
"""What `set_sync_debug_mode` was told."""


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed, self.at = enable_timing, -1.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at >= 0, "an event is waited for that was not recorded"

    def query(self) -> bool:
        return self.at >= 0

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed and self.at >= 0 and end.at >= 0):
            raise RuntimeError("Both events must be recorded, with enable_timing.")
        return max((end.at - self.at) * 1e3, 1e-4)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        pass


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self.captured = False

    def replay(self) -> None:
        if not self.captured:
            raise RuntimeError("The graph was not captured.")

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextmanager
def _graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Any:
    yield
    cuda_graph.captured = True


class Profile:
    """One graph of two kernels and a copy for each step; see `events.kernel_events`."""

    def __init__(self, **options: Any) -> None:
        inspect.signature(_REAL_PROFILE).bind(**options)

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        def event(name: str, ts: float, dur: float, launch: int, kind: str = "kernel") -> dict[str, Any]:
            args = {"correlation": launch}
            return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "args": args}

        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        for i in range(8):
            start = 1000.0 * i
            events += [event("_first", start, 400, i), event("_second", start + 410, 400, i)]
            events.append(event("Memcpy DtoH", start + 830, 10, 100 + i, "gpu_memcpy"))
        Path(path).write_text(json.dumps({"traceEvents": events}))


_REAL_PROFILE = torch.profiler.profile
_STREAM = Stream()


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the stand-in in its place; `replace` may be that of a test, which takes it back."""
    own: dict[str, Any] = {
        "Event": Event, "Stream": Stream, "CUDAGraph": CUDAGraph, "graph": _graph,
        "current_stream": lambda device=None: _STREAM,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "set_sync_debug_mode": lambda debug_mode: SYNC_MODES.append(str(debug_mode)),
        "get_device_name": lambda device=None: "a stand-in",
        "get_device_properties": lambda device=None: SimpleNamespace(
            L2_cache_size=1 << 20, multi_processor_count=4, total_memory=16 << 30, name="a stand-in"
        ),
    }  # fmt: skip
    for name, value in own.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
        replace(torch.cuda, name, value)
    replace(torch.profiler, "profile", Profile)
