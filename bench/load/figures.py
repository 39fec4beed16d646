"""What is said of servers under load: percentiles, goodput, medians over rounds, ratios within a round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.common import spread

from .servers import Lane

Json = dict[str, Any]
Row = dict[str, Any]  # of a request, as `client.py` writes it
PERCENTILES = (50, 90, 99)
RATIOS = (  # theirs over ours is how much faster we are
    ("first_token_seconds", "p50"), ("first_token_seconds", "p99"), ("token_seconds", "p50"),
    ("end_to_end_seconds", "p50"), ("end_to_end_seconds", "p99"),
)  # fmt: skip


class Bounds(NamedTuple):
    """What counts for goodput: seconds to the first token, and mean seconds for each after it."""

    first: float
    token: float


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def token_seconds(row: Row) -> float:
    """Mean time of a token after the first, however many of them a chunk carried."""
    return float((row["last"] - row["first"]) / max(row["tokens"] - 1, 1))


def met(row: Row, bounds: Bounds) -> bool:
    return not row["error"] and row["first"] <= bounds.first and token_seconds(row) <= bounds.token


def figures(result: Json, bounds: Bounds) -> Json:
    """Of one load on one server. Requests without a whole answer have no times; they are counted."""
    rows: list[Row] = result["requests"]
    answered = [row for row in rows if not row["error"]]
    seconds = max((row["at"] + row["end"] for row in answered), default=result["seconds"])
    good = sum(met(row, bounds) for row in rows)
    tokens = sum(row["tokens"] for row in answered)
    times: dict[str, Callable[[Row], float]] = {
        "first_token_seconds": lambda row: row["first"],
        "token_seconds": token_seconds,
        "longest_gap_seconds": lambda row: row["gap"],
        "end_to_end_seconds": lambda row: row["end"],
    }
    return {
        "requests": len(rows),
        "answered": len(answered),
        "refused": sum(row["status"] == 429 for row in rows),
        "failed": sum(bool(row["error"]) and row["status"] != 429 for row in rows),
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(row["prompt_tokens"] for row in answered),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "tokens_per_chunk": round(tokens / max(sum(row["chunks"] for row in answered), 1), 3),
        "goodput_share": round(good / len(rows), 4),
        "goodput_per_second": round(good / seconds, 4),
        **{name: _percentiles([of(row) for row in answered]) for name, of in times.items() if answered},
        "client_cpu_seconds": round(result["cpu_seconds"], 4),
        "client_late_seconds": round(max(row["late"] for row in rows), 4),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values, percent), 5) for percent in PERCENTILES}


def errors(rows: Sequence[Row]) -> dict[str, int]:
    """How often each was said."""
    return dict(Counter(row["error"] for row in rows if row["error"]))


def over_rounds(rounds: Sequence[Json]) -> Json:
    """The figures of all rounds, each with its median and its values in turn."""
    found: Json = {}
    for name in dict.fromkeys(name for figure in rounds for name in figure):
        values = [figure[name] for figure in rounds if name in figure]
        if isinstance(values[0], Mapping):
            found[name] = over_rounds(values)
        else:
            found[name] = {"median": spread(values)["median"], "rounds": values}
    return found


def ratios(ours: Sequence[Json], theirs: Sequence[Json]) -> Json:
    """Their times over ours, and our rate over theirs, within each round that has both."""
    found, both = {}, list(zip(ours, theirs, strict=True))
    for name, part in RATIOS:
        pairs = [(a[name][part], b[name][part]) for a, b in both if name in a and name in b]
        if pairs and all(a > 0 for a, _ in pairs):
            found[f"{name} {part}"] = spread([b / a for a, b in pairs])
    rates = [(a["tokens_per_second"], b["tokens_per_second"]) for a, b in both]
    if all(b > 0 for _, b in rates):
        found["tokens_per_second"] = spread([a / b for a, b in rates])
    return found


def best(lanes: Mapping[Lane, Json]) -> Lane | None:
    """The lane of most goodput; where that is equal, of the quickest answers. None of no lanes."""

    def rank(lane: Lane) -> tuple[float, float]:
        ends = lanes[lane].get("end_to_end_seconds")
        return -lanes[lane]["goodput_share"]["median"], ends["p50"]["median"] if ends else math.inf

    return min(lanes, key=rank, default=None)


def equal(rows: Sequence[Row], others: Sequence[Row]) -> list[int]:
    """How many texts are the same, and of how many requests that both answered; one load may be longer."""
    both = [(a, b) for a, b in zip(rows, others) if not a["error"] and not b["error"]]
    return [sum(a["text"] == b["text"] for a, b in both), len(both)]
