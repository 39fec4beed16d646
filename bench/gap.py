"""How long a running engine leaves the device idle between two steps, and what a step is made of.

    python bench/gap.py [--shape qwen3-0.6b] [--batches 1 64] [--out bench/results]

An engine decodes with K = 4 and 1k tokens of context; drafts are accepted at random, half of them
(`bench/simulation.py`). Three views of its steps: the wall time of a step against its replay alone; events
of the device around each replay; and a trace of a few steps, whose kernels are also summed up by name
(where launches depend on each other's begin, a kernel's time includes what it waits for the one before).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import events
from bench.rows import TARGETS, Rows, release_memory, run
from bench.simulation import TOKENS, SyntheticWorker
from bench.steps import load_shape, make_config, step_ms
from nanospec import SamplingParams, SpecConfig
from nanospec.engine.engine import Engine
from nanospec.models.decoder import Model

K = 4
STEPS = 40  # timed together
TRACED = 8


class Stamped:
    """A capture that notes when the device begins and ends each replay."""

    def __init__(self, capture: Any) -> None:
        self.capture, self.stamps = capture, list[tuple[Any, Any]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.capture, name)

    def replay(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.capture.replay()
        end.record()
        self.stamps.append((begin, end))

    def gaps_ms(self) -> list[float]:
        """Between the end of each replay and the begin of the next."""
        torch.cuda.synchronize()
        return [a[1].elapsed_time(b[0]) for a, b in zip(self.stamps, self.stamps[1:])]


def running(model: Model, batch: int, context: int) -> Engine:
    """An engine with so many requests in the midst of decoding."""
    room = 12 * STEPS * (K + 1)
    config = make_config(model, batch, context + room, SpecConfig(num_speculative_tokens=K))
    engine = Engine(config, SyntheticWorker(0.5, config, model))
    params = SamplingParams(temperature=0, max_tokens=room - 1, ignore_eos=True)
    for _ in range(batch):
        engine.add([i % TOKENS for i in range(context)], params)
    for _ in range(10000):
        engine.step()
        if all(r.output_ids for r in engine.scheduler.running) and not engine.scheduler.waiting:
            break
    for _ in range(10):
        engine.step()
    return engine


def length(engine: Engine) -> int:
    """Tokens of a request, on average."""
    return round(statistics.mean(request.num_tokens for request in engine.scheduler.running))


def wall_ms(engine: Engine) -> float:
    """Of a step: the median of five stretches."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(found)


def traced(engine: Engine) -> list[dict[str, Any]]:
    """What ran on the device in a few steps."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        for _ in range(TRACED):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return events.kernel_events(json.loads(path.read_text()))


def replays(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each replay of a graph: of the launches that ran the most kernels."""
    by_launch: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        by_launch[event["launch"]].append(event)
    most = max(map(len, by_launch.values()), default=0)
    return [group for group in by_launch.values() if most > 1 and len(group) > most // 2]


def report_trace(out: Rows, name: str, found: list[dict[str, Any]], **figures: Any) -> None:
    groups = replays(found)
    if len(groups) < 2:
        out.add(f"{name}: no graph in the trace ({len(found)} events)", what="trace", **figures)
        return
    ends = [max(event["end"] for event in group) for group in groups]
    starts = [min(event["start"] for event in group) for group in groups]
    gaps = [begin - end for end, begin in zip(ends, starts[1:])]
    inside = []  # what no kernel covers within a replay
    for group, start, end in zip(groups, starts, ends):
        covered, reached = 0.0, start
        for event in group:
            covered += max(event["end"] - max(event["start"], reached), 0.0)
            reached = max(reached, event["end"])
        inside.append(end - start - covered)
    lengths = [end - start for start, end in zip(starts, ends)]
    step, gap = statistics.median(lengths), statistics.median(gaps)
    text = f"{name} trace: replay {step:.0f} us, {len(groups[-1])} launches, gap to the next {gap:.1f} us"
    out.add(
        f"{text}, idle inside {statistics.median(inside):.1f} us", headline=True, what="trace", gap_us=gap,
        replay_us=step, launches=len(groups[-1]), idle_inside_us=statistics.median(inside), **figures,
    )  # fmt: skip
    us: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in (event for group in groups for event in group):
        us[event["name"]] += event["end"] - event["start"]
        count[event["name"]] += 1
    for kernel, total in us.most_common(14):
        per_step, launches = total / len(groups), count[kernel] / len(groups)
        each = total / count[kernel]
        out.add(
            f"{name} kernel {kernel[:50]:50} {launches:5.0f} x {each:8.2f} us = {per_step:8.1f} us",
            what="kernel", kernel=kernel[:200], launches=launches, us_per_step=round(per_step, 2), **figures,
        )  # fmt: skip


def gap(out: Rows, model: Model, shape: str, batch: int, repeats: int) -> None:
    context = 64 if out.cpu else 1024
    engine = running(model, batch, context)
    graphs = engine.worker.graphs
    assert graphs is not None
    bucket = graphs.bucket_for(batch, K)
    before = length(engine)
    step = wall_ms(engine)
    middle = (before + length(engine)) // 2
    stamped = Stamped(graphs.captures[bucket])
    graphs.captures[bucket] = stamped
    for _ in range(STEPS):
        engine.step()
    between = stamped.gaps_ms()
    graphs.captures[bucket] = stamped.capture
    name, figures = f"{shape} B={batch} K={K}", {"shape": shape, "batch": batch, "k": K}
    with out.attempt(f"{name} trace"):
        report_trace(out, name, traced(engine), **figures)
    engine.abort_all()
    with torch.inference_mode():  # as the engine captured it
        replay = step_ms(engine.worker, bucket, middle, repeats)
    share, target, us = max(step - replay, 0.0) / step, TARGETS["host gap"], statistics.median(between) * 1e3
    out.add(
        f"{name}: step {step:.3f} ms, replay alone {replay:.3f}, gap {share:.1%} {target.judge(share)} "
        f"({target}); by events {us:.1f} us", headline=True, what="gap", step_ms=round(step, 4),
        replay_ms=round(replay, 4), gap_share=round(share, 4), gap_events_us=round(us, 2), **figures,
    )  # fmt: skip


def measure(out: Rows, args: argparse.Namespace) -> None:
    model, _ = load_shape(args.shape, out)
    for batch in args.batches:
        if out.has_time(f"{args.shape} gap B={batch}", 5.0):
            with out.attempt(f"{args.shape} gap B={batch}"):
                gap(out, model, args.shape, batch, args.repeats)
            release_memory()


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--repeats", type=int, default=10)
    run("steps", measure, parser, argv)


if __name__ == "__main__":
    main()
