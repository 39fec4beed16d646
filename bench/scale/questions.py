"""What needs time: waiting, caches, requests of all lengths. An 8B model, a GPU a replica; see `runs.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench.scale.costs import Costs
from bench.scale.guessing import Brought, Guessing, captured
from bench.scale.paper import steady
from bench.scale.routing import ROUTERS
from bench.scale.runs import Bounds, Setup, capacity, figures, paper_rate, served_well, shorten, spread
from bench.scale.workload import Workload
from bench.strategies import Fixed, automatic, simulate
from bench.traces import Trace
from nanospec.apps.cli.shapes import SHAPES
from nanospec.drafters.costs import StepCosts

Json = dict[str, Any]
SECONDS = {1: 300.0, 10: 60.0, 100: 30.0, 1000: 20.0}  # of a run, by GPUs
POLICIES: dict[str, int | None] = {"none": 0, "K=4": 4, "auto": None}
EIGHT = "qwen3-8b"


def cost(kinds: Mapping[str, Brought], sizes: Sequence[int]) -> Json:
    """Dollars per million tokens by number of GPUs, text and policy, of an 8B model."""
    costs, found = Costs(SHAPES[EIGHT]), dict[str, Any]()
    for name, kind in kinds.items():
        for policy, k in POLICIES.items():
            guessing = Guessing([kind], k)
            low, rows = 0.0, {}
            for size in sizes:
                if size >= 1000 and k == 4:
                    continue  # slow to run, and no use
                setup = Setup(costs, guessing, size)
                load, bounds = Workload(1.0, SECONDS[size]), Bounds()
                if not low:  # larger fleets take a little more
                    low = 0.5 * paper_rate(setup, load, bounds, kind if k is None else {k: kind[k]})
                rate, there = capacity(
                    setup, load, bounds, low, {1: 1.2, 10: 1.1, 100: 1.04, 1000: 1.02}[size] * low
                )
                rows[str(size)] = {"requests_per_s_and_gpu": rate, **there}
                low = rate
            found.setdefault(name, {})[policy] = rows
    return found


PREFIXES = 100  # per GPU: the number of those who ask grows with the fleet


def sharing(shared: int, size: int, skew: float = 0.8) -> Workload:
    """Prompts of 2,048 tokens of which `shared` are a prefix."""
    prefixes = PREFIXES * size
    return Workload(1.0, 24.0, prompt=2048, output=200, shared=shared, prefixes=prefixes, skew=skew)


def routing(
    kinds: Mapping[str, Brought], sizes: Sequence[int], shares: Sequence[float], size: int = 16
) -> Json:
    """What a fleet takes by router: over its size, with three quarters of a prompt shared; and, of `size`
    GPUs, over that share, and what becomes of a load when some prefixes are asked for more often."""
    guessing, costs = Guessing([kinds["prose"]]), Costs(SHAPES[EIGHT])

    def rates(size: int, shared: int, routers: Sequence[str]) -> Json:
        start, rows = 10.0, {}
        for router in routers:
            setup = Setup(costs, guessing, size, router)
            rate, there = capacity(setup, sharing(shared, size), Bounds(), start, 1.2 * start)
            rows[router] = {"requests_per_s_and_gpu": rate, **there}
            start = rate
        return rows

    skewed = {skew: replace(sharing(1536, size, skew), rate=12.0 * size) for skew in (0.0, 0.8, 1.2)}
    return {
        "prefixes_per_gpu": PREFIXES,
        "cache_tokens": costs.kv_tokens,
        "gpus": size,
        "by_size": {str(n): rates(n, 1536, [*ROUTERS]) for n in sizes},
        "by_share": {str(s): rates(size, int(2048 * s), ["least loaded", "prefix"]) for s in shares},
        "by_skew": {
            str(skew): {
                router: figures(Setup(costs, guessing, size, router), load, Bounds()) for router in ROUTERS
            }
            for skew, load in skewed.items()
        },
    }


RATIOS = ((512, 512), (1024, 256), (4096, 256), (8192, 128))


def disaggregation(kinds: Mapping[str, Brought], gpus: int = 16) -> Json:
    """What GPUs take when all of them do both, and with the best number of them for prompts alone; by lengths
    of prompt and output, and bound on the time of a token."""
    costs, found = Costs(SHAPES[EIGHT]), list[Json]()
    guessing = Guessing([kinds["prose"]])
    for prompt, output in RATIOS:
        for token in (0.01, 0.02, 0.05):
            load, bounds = Workload(1.0, 40.0, prompt, output), Bounds(1.0, token)
            both = Setup(costs, guessing, gpus)
            about = paper_rate(both, load, bounds, kinds["prose"])
            rate, there = capacity(both, load, bounds, 0.7 * about, about)
            parts = {
                n: capacity(replace(both, prefillers=n), load, bounds, 0.9 * about, 1.1 * about)
                for n in _prefillers(both, load, bounds, kinds["prose"])
            }
            best = max(parts, key=lambda n: parts[n][0])
            row = {"prompt": prompt, "output": output, "token_ms": 1e3 * token, "prefillers": best}
            row |= {"together": rate, "apart": parts[best][0], "gain": shorten(parts[best][0] / rate)}
            found.append(row | {"figures": {"together": there, "apart": parts[best][1]}})
    return {"gpus": gpus, "rows": found, "bandwidths": _bandwidths(costs, guessing, gpus)}


def _prefillers(setup: Setup, load: Workload, bounds: Bounds, kind: Brought) -> list[int]:
    """About how many of the GPUs prompts need, by what a request takes of both kinds."""
    prompt = setup.costs.prompt(load.prompt) / 1e3
    decode = 1 / paper_rate(setup, load, bounds, kind, cached=load.prompt - 1)
    need = setup.replicas * prompt / (prompt + decode)
    return sorted({min(max(round(need) + more, 1), setup.replicas - 1) for more in (-1, 0, 1)})


def _bandwidths(costs: Costs, guessing: Guessing, gpus: int) -> Json:
    """Prompts of 4,096 tokens, half of the GPUs for them: what sending K/V does to the time of a token."""
    load = Workload(5.0 * gpus, 40.0, 4096, 256)
    speeds = (1e9, 5e9, 10e9, 25e9, 50e9, 400e9)
    setups = {speed: Setup(costs, guessing, gpus, prefillers=gpus // 2, bandwidth=speed) for speed in speeds}
    return {f"{speed / 1e9:g}": figures(setup, load, Bounds(2.0, 0.05)) for speed, setup in setups.items()}


def day(kinds: Mapping[str, Brought], rate: float, gpus: int = 16, seconds: float = 240.0) -> Json:
    """A day of so many seconds, half of the requests of either kind of text, by policy: the hours."""
    costs, found = Costs(SHAPES[EIGHT]), dict[str, Any]()
    load = Workload(rate * gpus, seconds, copying=0.5, shape="day")
    for policy, k in POLICIES.items():
        setup = Setup(costs, Guessing([kinds["prose"], kinds["code edits"]], k), gpus)
        fleet, requests = setup.fleet(), load.requests()
        fleet.run(requests)
        hours = [[r for r in requests if int(24 * r.at / seconds) == hour] for hour in range(24)]
        found[policy] = {
            "requests_per_s_and_gpu": [shorten(len(h) / seconds * 24 / gpus) for h in hours],
            "tpot_ms": [shorten(1e3 * fmean(r.tpot for r in h if r.output > 1)) for h in hours],
            "ttft_ms": [spread([1e3 * r.ttft for r in h]) for h in hours],
            "served_well": shorten(sum(served_well(r, Bounds()) for r in requests) / len(requests)),
        }
    return {"gpus": gpus, "mean_requests_per_s_and_gpu": rate, "policies": found}


def bursts(kinds: Mapping[str, Brought], rate: float, gpus: int = 16) -> Json:
    """The same load evenly and in bursts, by router."""
    costs, guessing = Costs(SHAPES[EIGHT]), Guessing([kinds["prose"]])
    return {
        shape: {
            router: figures(Setup(costs, guessing, gpus, router), load, Bounds())
            for router in ("random", "least loaded")
        }
        for shape in ("poisson", "bursts")
        for load in [Workload(rate * gpus, 60.0, shape=shape)]
    }


# ---- is the simulation right -------------------------------------------------------------------


def saturated(kind: Brought) -> list[Json]:
    """A replica that always has as many rows as it may: tokens per second by the roofline and simulated."""
    found = []
    for rows in (8, 64, 256):
        setup = Setup(Costs(SHAPES[EIGHT]), Guessing([kind], 0), rows=rows, chunk=2048)
        point = steady(setup.costs, {0: 1.0}, rows, 0, 1024, 256)
        load = Workload(1.5 * point.rate / 256, 60.0, 1024, 256, spread=0.0)
        fleet, requests = setup.fleet(), load.requests()
        fleet.run(requests)
        done = [r for r in requests if 20 <= r.end < 60]
        found.append(
            {"rows": rows, "roofline": shorten(point.rate), "simulated": shorten(256 * len(done) / 40)}
        )
    return found


def auto_policy(kinds: Mapping[str, Sequence[Trace]], table: Mapping[str, Brought]) -> list[Json]:
    """Tokens per ms of the engine's `AutoPolicy`, which learns from replayed texts as it goes, over those of
    the K that the table says is best."""
    costs, found = Costs(SHAPES[EIGHT]), []
    for name, traces in kinds.items():
        for rows in (1, 16, 64, 256):
            ms = {k: costs.step(rows, k, rows * 1152) for k in captured(rows)}
            steps = StepCosts({rows: ms})
            k = max(ms, key=lambda k: table[name][k] / ms[k])
            runs = {
                who: simulate(traces, rows, strategy, max(10_000, 400 * rows)).rate
                for who, strategy in {"auto": automatic(steps), "fixed": Fixed(k, steps)}.items()
            }
            found.append(
                {"text": name, "rows": rows, "k": k, "reached": shorten(runs["auto"] / runs["fixed"])}
            )
    return found
