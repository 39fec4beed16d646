"""GPU timing with device events and CUDA graphs, and measurement of the memory bandwidth and FLOP rate."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]
REPLAY_MS = 4.0  # minimum duration of a measurement, well above the timer resolution


def time_ms(run: Call, calls: int = 1) -> float:
    """Return the milliseconds per call of a function that makes `calls` calls."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def capture(calls: Sequence[Call]) -> tuple[Call, int]:
    """Capture a CUDA graph of repeated rounds over `calls` that takes about `REPLAY_MS`.

    Returns a function that replays the graph, and the number of calls in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate outside of the capture
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    once = time_ms(lambda: [call() for call in calls], len(calls))
    rounds = max(1, min(50, int(REPLAY_MS / max(once, 1e-3) / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, rounds * len(calls)


def interleaved(runs: Mapping[str, tuple[Call, int]], repeats: int) -> dict[str, list[float]]:
    """Alternate between the runs. Return the milliseconds per call of each, one value per repeat."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, calls) in runs.items():
            times[name].append(time_ms(run, calls))
    return times


def limits(device: torch.device) -> dict[str, float]:
    """Measure the bytes per second of a copy (read plus write) and the FLOPs per second of a bf16 matmul."""
    free = torch.cuda.mem_get_info()[0]  # the copy needs twice its size
    size, n = (1 << 16, 32) if device.type == "cpu" else (min(2 << 30, free // 8), 8192)
    found = torch.zeros(size, dtype=torch.uint8, device=device)
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    times = interleaved({"copy": (found.clone, 1), "product": (lambda: a @ a, 1)}, 12)
    copy, product = (statistics.median(values[2:]) / 1e3 for values in times.values())
    torch.cuda.empty_cache()
    return {"bandwidth": 2 * size / copy, "flops": 2 * n**3 / product}
