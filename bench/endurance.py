"""100,000 requests through 64 rows, over four days of the engine's clock: does anything grow with the past?

    python bench/endurance.py [--requests 100000]

The model is that of `campaigns/simulate/model.py`, whose forward pass takes almost no time, so the benchmark
measures the host's work: with lookup, prompts of one token to a whole window but one, all
kinds of parameters, and clients that leave. Per fortieth of the requests: processor time per step, resident
memory, and how many objects Python holds. The first tenth fills what is cached and does not count. Each step
moves the engine's clock on, so that the last request comes four days after the first. The result is
`bench/results/endurance.json`.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from campaigns.simulate.model import Mock
from nanospec.config import SamplingParams
from nanospec.engine.engine import Engine
from tests.drive import assert_idle, make_engine

ROWS, WINDOW, VOCAB, AT_ONCE = 64, 96, 64, 160
PARTS = 40  # looks at memory
WARM = 4  # of them that fill caches
DAY = 86_400.0  # seconds


def requests(count: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts, a third of which begin alike, with parameters."""
    rng = random.Random(0)
    for i in range(count):
        length = rng.choice((1, WINDOW - 1, rng.randint(2, 40), rng.randint(2, 40)))
        own = [rng.randrange(VOCAB) for _ in range(length)]
        params: dict[str, Any] = {"max_tokens": rng.choice((1, 6, 12, 60)), "temperature": i % 2, "seed": i}
        params |= rng.choice(({}, {}, {}, {"logprobs": 2}, {"presence_penalty": 1.0}, {"top_k": 5}))
        yield ([*range(33), *own] if i % 3 == 0 else own)[: WINDOW - 1], SamplingParams(**params)


class Clock:
    """`time.perf_counter` that also passes as many seconds as it is told."""

    def __init__(self) -> None:
        self.passed, self.real = 0.0, time.perf_counter

    def __call__(self) -> float:
        return self.real() + self.passed


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


def endure(engine: Engine, count: int, clock: Clock) -> dict[str, list[float]]:
    """Figures of each part."""
    waiting, rng, live = requests(count), random.Random(1), list[Any]()
    found: dict[str, list[float]] = {"step_ms": [], "resident_mb": [], "objects": []}
    ended, steps = 0, list[float]()
    while ended < count:
        while len(live) < AT_ONCE and (asked := next(waiting, None)) is not None:
            live.append(engine.add(*asked))
        start = time.process_time()
        engine.step()
        steps.append((time.process_time() - start) * 1e3)
        clock.passed += 20 * DAY / count  # there are more steps than a twentieth of the requests
        if rng.random() < 0.5:
            engine.abort(rng.choice(live))
        ended += sum(request.is_finished for request in live)
        live = [request for request in live if not request.is_finished]
        if ended >= (len(found["step_ms"]) + 1) * count / PARTS:
            gc.collect()
            found["step_ms"].append(round(statistics.median(steps), 3))
            found["resident_mb"].append(resident_mb())
            found["objects"].append(len(gc.get_objects()))
            steps.clear()
    return found


def run(count: int) -> dict[str, Any]:
    """The result."""
    model, clock = Mock(VOCAB, WINDOW, 0, 0.3), Clock()
    with mock.patch("time.perf_counter", clock):
        engine = make_engine(model, 4, max_num_seqs=ROWS, max_model_len=WINDOW, num_blocks=2 * ROWS)
        parts = endure(engine, count, clock)
    assert_idle(engine)
    late = {name: values[WARM:] for name, values in parts.items()}
    metrics = engine.metrics
    return {
        "requests": count,
        "rows": ROWS,
        "steps": metrics.num_forward_steps,
        "tokens": metrics.spec.num_tokens,
        "preemptions": metrics.num_preemptions,
        "aborted": metrics.num_aborted,
        "cached_tokens": metrics.num_cached_tokens,
        "days": round(clock.passed / DAY, 2),
        "memory_growth_mb": round(late["resident_mb"][-1] - late["resident_mb"][0], 1),
        "object_growth": late["objects"][-1] - late["objects"][0],
        "step_time_last_to_first": round(_late(late["step_ms"]) / _early(late["step_ms"]), 3),
        **parts,
    }


def _early(values: list[float]) -> float:
    return statistics.median(values[: PARTS // 4])


def _late(values: list[float]) -> float:
    return statistics.median(values[-PARTS // 4 : -1])  # the very last steps have few rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    common.save("endurance", {"machine": common.environment(), **run(args.requests)}, args.out)


if __name__ == "__main__":
    main()
