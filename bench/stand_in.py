"""A fake `torch.cuda` for dry runs of GPU benchmarks on machines without a GPU. Times are meaningless.

Events read the host's clock. A graph runs its work once, during capture, and a replay does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at >= 0, "an event was not recorded"

    def elapsed_time(self, end: Event) -> float:
        assert self.at >= 0, "an event was not recorded"
        return max((end.at - self.at) * 1e3, 1e-4)


class Stream:
    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)


class CUDAGraph:
    captured = False

    def replay(self) -> None:
        assert self.captured, "the graph was not captured"


@contextmanager
def _graph(cuda_graph: CUDAGraph) -> Iterator[None]:
    yield
    cuda_graph.captured = True


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace the parts of `torch.cuda` that the benchmarks use. Tests pass `monkeypatch.setattr`."""
    stream = Stream()
    fakes: dict[str, Any] = {
        "Event": Event, "Stream": Stream, "CUDAGraph": CUDAGraph, "graph": _graph,
        "current_stream": lambda: stream, "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None, "empty_cache": lambda: None,
        "mem_get_info": lambda: (8 << 30, 16 << 30),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 20),
    }  # fmt: skip
    for name, value in fakes.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
        replace(torch.cuda, name, value)
