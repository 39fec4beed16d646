"""Time on a GPU, by its own clock: device events, CUDA graphs of many calls, and the two ceilings.

Everything here is asked of `torch.cuda`, so that `bench/stand_in.py` can take its place in a dry run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], object]
REPLAY_MS = 4.0  # at least this long per measurement, so that the clock's steps do not show


def time_ms(run: Call, calls: int = 1) -> float:
    """Milliseconds per call of something that makes `calls` calls, by device events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def capture(calls: Sequence[Call], rounds: int = 0) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of several rounds over `calls`, and how many calls it makes; 0 rounds: as many as fill
    `REPLAY_MS`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile, and make what is made once, outside of the capture
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    once = time_ms(lambda: [call() for call in calls], len(calls))
    rounds = rounds or max(1, min(50, int(REPLAY_MS / max(once, 1e-3) / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * len(calls)


def interleaved(runs: Mapping[str, tuple[Call, int]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds per call of each of several things that make some calls, in turn, one value per repeat."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, calls) in runs.items():
            times[name].append(time_ms(run, calls))
    return times


def spread(values: Sequence[float]) -> float:
    """How far the repeats lie apart, as a share of their median."""
    return (max(values) - min(values)) / statistics.median(values)


def copy_bandwidth(device: torch.device, size: int = 2 << 30) -> float:
    """Bytes per second of a copy on the device, read plus written."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [time_ms(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * source.numel() / (statistics.median(times[2:]) / 1e3)


def matrix_rate(device: torch.device, n: int = 8192) -> float:
    """Operations per second of a bf16 product of random n x n matrices."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [time_ms(lambda: a @ b) for _ in range(12)]
    return 2 * n**3 / (statistics.median(times[2:]) / 1e3)


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes and operations per second that this machine reaches."""
    if device.type == "cpu":  # a dry run
        found = {"bandwidth": copy_bandwidth(device, 1 << 16), "flops": matrix_rate(device, 32)}
    else:
        found = {"bandwidth": copy_bandwidth(device), "flops": matrix_rate(device)}
    torch.cuda.empty_cache()
    return found


def kernel_events(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What ran on the device, in order, of a trace as torch's profiler exports it for Chrome: name, start
    and end in microseconds, and the launch that it belongs to."""
    found = []
    for event in trace.get("traceEvents", ()):
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("ph") == "X":
            start = float(event["ts"])
            found.append({
                "name": str(event["name"]), "start": start, "end": start + float(event["dur"]),
                "launch": event.get("args", {}).get("correlation"),
            })  # fmt: skip
    return sorted(found, key=lambda event: event["start"])
