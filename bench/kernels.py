"""Time every kernel on this GPU against what the hardware allows, and against its peers.

    python bench/kernels.py [--only attention] [--repeats 5] [--out bench/results]

The two ceilings are measured first: a device-to-device copy (bytes read plus written) and a large bf16
matrix product. A case of `bench/cases` is then captured in a CUDA graph, its calls rotating over enough
sets of inputs to overflow the L2 cache, and timed by replay: so launch gaps on the host do not count,
and neither does data left over from the call before. Kernel and peers take turns, and the medians are
reported with the spread of the repeats. `share` is the time that the least bytes and operations would
take at the ceilings, over the time taken. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench import common  # noqa: E402
from bench.cases import Built, Call, Case, all_cases  # noqa: E402

MAX_SETS = 64  # of inputs
REPLAY_MS = 4.0  # at least this long per measurement, so that the clock's steps do not show


def time_ms(run: Callable[[], object], calls: int) -> float:
    """Milliseconds per call of something that makes `calls` calls, by device events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, read plus written."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [time_ms(lambda: target.copy_(source), 1) for _ in range(12)]
    return 2 * source.numel() / (statistics.median(times[2:]) / 1e3)


def matrix_rate() -> float:
    """Operations per second of a bf16 product of random 8192 x 8192 matrices."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [time_ms(lambda: a @ b, 1) for _ in range(12)]
    return 2 * n**3 / (statistics.median(times[2:]) / 1e3)


def capture(calls: list[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of several rounds over `calls`, and how many calls it makes."""
    for call in calls:  # compile, and make what is made once, outside of the capture
        call()
    torch.cuda.synchronize()
    once = time_ms(lambda: [call() for call in calls], len(calls))
    rounds = max(1, min(50, int(REPLAY_MS / max(once, 1e-3) / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return graph, rounds * len(calls)


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Milliseconds per call of the kernel and of each peer that runs, one value per repeat."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = min(MAX_SETS, 1 + 2 * cache // max(case.bytes, 1))
    built: list[Built] = [case.build("cuda") for _ in range(sets)]
    graphs = {"kernel": capture([b.run for b in built])}
    for name in built[0].peers:
        try:
            graphs[name] = capture([b.peers[name] for b in built])
        except RuntimeError as error:  # a peer that this machine does not have
            print(f"{case.kernel} {case.label}: {name} failed: {str(error).splitlines()[0]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, (graph, calls) in graphs.items():
            times[name].append(time_ms(graph.replay, calls))
    return times


def row(case: Case, times: dict[str, list[float]], bandwidth: float, rate: float) -> dict[str, Any]:
    median = statistics.median(times["kernel"])
    limit = max(case.bytes / bandwidth, case.flops / rate) * 1e3
    return {
        "kernel": case.kernel,
        "case": case.label,
        "us": round(median * 1e3, 2),
        "spread": round((max(times["kernel"]) - min(times["kernel"])) / median, 3),
        "limit_us": round(limit * 1e3, 2),
        "share": round(limit / median, 3),
        "peers_us": {
            name: round(statistics.median(values) * 1e3, 2)
            for name, values in times.items()
            if name != "kernel"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for kernels.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/kernels.py needs a GPU; bench/compile.py works without one.")
    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    print(f"{'kernel':14} {'case':34} {'us':>9} {'limit':>9} {'share':>6}  peers (us)")
    rows = []
    for case in all_cases():
        if not case.timed or arguments.only not in f"{case.kernel}-{case.label}":
            continue
        try:
            rows.append(row(case, measure(case, arguments.repeats), bandwidth, rate))
        except Exception as error:  # one broken case must not cost the others' results
            print(f"{case.kernel} {case.label}: {error!r}", file=sys.stderr)
            rows.append({"kernel": case.kernel, "case": case.label, "error": repr(error)})
            continue
        finally:
            torch.cuda.empty_cache()
        r = rows[-1]
        peers = "  ".join(f"{name} {value}" for name, value in r["peers_us"].items())
        print(
            f"{r['kernel']:14} {r['case']:34} {r['us']:9.2f} {r['limit_us']:9.2f} {r['share']:6.1%}  {peers}",
            flush=True,
        )
    results = {
        "environment": common.environment(),
        "copy_bandwidth": bandwidth,
        "matrix_rate": rate,
        "results": rows,
    }
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "kernels.json").write_text(json.dumps(results, indent=1) + "\n")
    failed = sum("error" in r for r in rows)
    shares: dict[str, list[float]] = {}
    for r in rows:
        shares.setdefault(r["kernel"], []).append(r.get("share", 0.0))
    median_share = {kernel: statistics.median(values) for kernel, values in shares.items()}
    print(json.dumps({"cases": len(rows), "failed": failed, "median_share": median_share}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
