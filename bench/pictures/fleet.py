"""A fleet on paper (`fleet.json`, by `bench/fleet.py`): what drafts gain, what routers take, a day, and from
which size on a draft model is better split. Nothing of it was measured but what drafts bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import style

MODELS = {"qwen3-0.6b": "0.6B", "qwen3-8b": "8B", "llama-3.3-70b": "70B"}
COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.GREY)
NOTE = (
    "Computed by the account of a step on an H200, not measured; the assumptions are in docs/scaling.md. "
    "Numbers: bench/results/fleet.json."
)


class Line(NamedTuple):
    """A curve and what is written at its end."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dash: str = "-"


class Picture(NamedTuple):
    """One of them, as `__main__.py` draws it."""

    read: Callable[[Path], style.Json | None]
    title: Callable[[style.Json], str]
    draw: Callable[[style.Json], Any]


def read(folder: Path) -> style.Json | None:
    return style.load(folder, "fleet") or None


def lines(axis: Any, curves: Sequence[Line], apart: float) -> None:
    """Curves with their names at their right ends, no two of which are nearer than `apart` of the axis."""
    ends = sorted(((axis.transData.transform((1, c.y[-1]))[1], c) for c in curves), key=lambda end: end[0])
    box, last = axis.get_window_extent(), float("-inf")
    for height, curve in ends:
        axis.plot(curve.x, curve.y, curve.dash, color=curve.color, lw=1.8, solid_capstyle="round")
        last = max(height, last + apart * box.height)
        y = axis.transData.inverted().transform((0, last))[1]
        axis.annotate(
            curve.name, (curve.x[-1], y), (6, 0), color=curve.color, va="center", fontsize=9,
            textcoords="offset points", annotation_clip=False,
        )  # fmt: skip


# ---- what drafts gain ----------------------------------------------------------------------------


def gain_title(data: style.Json) -> str:
    prose, code = (data["drafts"]["qwen3-8b"][kind] for kind in ("prose", "code edits"))
    most, last = [*code["rows"].items()][-1]
    return (
        f"Drafts pay an 8B model up to {prose['worth_until']} rows of prose; with code edits they still gain "
        f"{last['gain'] - 1:.0%} at {most} rows"
    )


def draw_gain(data: style.Json) -> Any:
    figure, (x, y, width, height) = style.canvas(
        gain_title(data),
        "Tokens per second with the best K over none, by rows that decode at once (lookup; steps alone, "
        "1,152 tokens of text each). Solid: code edits, dashed: prose; 70B on 4 GPUs.",
        NOTE,
        3.5,
    )
    axis = figure.add_axes((x + 0.06, y + 0.08, width - 0.2, height - 0.09))
    curves = [
        Line(f"{name}, {kind}", [int(n) for n in rows], [row["gain"] for row in rows.values()], color, dash)
        for (model, name), color in zip(MODELS.items(), COLORS)
        for kind, dash in (("code edits", "-"), ("prose", "--"))
        for rows in [data["drafts"][model][kind]["rows"]]
    ]
    axis.set(xscale="log", xlim=(1, 512), ylim=(0.9, 3.1), xlabel="rows", ylabel="times as fast")
    axis.set_xticks((1, 4, 16, 64, 256), ("1", "4", "16", "64", "256"))
    axis.minorticks_off()
    axis.axhline(1, color=style.GREY, lw=0.8)
    lines(axis, curves, 0.055)
    return figure


# ---- routing -------------------------------------------------------------------------------------

ROUTERS = {
    "prefix": "by prefix, bounded",
    "least loaded": "least loaded",
    "random": "random",
    "hash": "by hash alone",
}


def rates(data: style.Json, router: str) -> dict[int, float]:
    """Requests per second and GPU, by GPUs."""
    by_size = data["routing"]["by_size"]
    return {int(n): routers[router]["requests_per_s_and_gpu"] for n, routers in by_size.items()}


def routing_title(data: style.Json) -> str:
    prefix, least, hashed = (rates(data, router) for router in ("prefix", "least loaded", "hash"))
    most = max(prefix)
    return (
        f"On {most} GPUs routing by prefix takes {prefix[most] / least[most]:.1f} times the load of the "
        f"least loaded, a hash alone {hashed[most] / least[most]:.1f} times"
    )


def draw_routing(data: style.Json) -> Any:
    per_gpu = data["routing"]["prefixes_per_gpu"]
    figure, (x, y, width, height) = style.canvas(
        routing_title(data),
        f"Requests per second and GPU served well, by GPUs, of an 8B model. Three quarters of each prompt of "
        f"2,048 tokens are one of {per_gpu} prefixes per GPU (Zipf, 0.8).",
        NOTE,
        3.3,
    )
    axis = figure.add_axes((x + 0.06, y + 0.08, width - 0.22, height - 0.09))
    curves = [
        Line(name, [*found], [*found.values()], color)
        for (router, name), color in zip(ROUTERS.items(), COLORS)
        for found in [rates(data, router)]
    ]
    sizes = curves[0].x
    top = max(max(curve.y) for curve in curves)
    axis.set(xscale="log", xlim=(min(sizes), max(sizes)), ylim=(0, 1.1 * top), xlabel="GPUs")
    axis.set_ylabel("requests per second and GPU")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    lines(axis, curves, 0.07)
    return figure


# ---- a day ---------------------------------------------------------------------------------------

POLICIES = {"auto": "automatic K", "none": "no drafts", "K=4": "K = 4"}


def tokens_ms(data: style.Json, policy: str, hour: int) -> float:
    """ms per token, mean of the requests of an hour."""
    return float(data["day"]["policies"][policy]["tpot_ms"][hour])


def day_title(data: style.Json) -> str:
    night, noon = (tokens_ms(data, "none", hour) / tokens_ms(data, "auto", hour) for hour in (0, 12))
    fixed = max(tokens_ms(data, "K=4", hour) / tokens_ms(data, "none", hour) for hour in range(24))
    return (
        f"Automatic K makes tokens {night:.1f} times as fast as none at night and {noon:.1f} times at noon; "
        f"a fixed K = 4 makes them up to {fixed:.1f} times as slow"
    )


def draw_day(data: style.Json) -> Any:
    day = data["day"]
    rate = f"{day['mean_requests_per_s_and_gpu']:g}"
    figure, (x, y, width, height) = style.canvas(
        day_title(data),
        f"ms per token over a day (mean of each hour), {day['gpus']} GPUs with an 8B model. Half of the "
        f"requests are code edits. {rate} come per second and GPU on average, 0.4 of that at midnight and "
        "1.6 at noon.",
        NOTE,
        3.3,
    )
    axis = figure.add_axes((x + 0.06, y + 0.08, width - 0.2, height - 0.09))
    curves = [
        Line(name, range(24), day["policies"][policy]["tpot_ms"], color)
        for (policy, name), color in zip(POLICIES.items(), COLORS)
    ]
    axis.set(
        xlim=(0, 23), ylim=(0, 1.08 * max(max(c.y) for c in curves)), xlabel="hour", ylabel="ms per token"
    )
    axis.set_xticks(range(0, 24, 6))
    lines(axis, curves, 0.07)
    return figure


# ---- a draft model -------------------------------------------------------------------------------


def crossovers(data: style.Json, gpus: int, rows: int = 1, exchange: int = 10) -> dict[int, float]:
    """Billions of parameters by layers."""
    return {
        row["layers"]: row["parameters"] / 1e9
        for row in data["draft_models"]["crossovers"]
        if (row["gpus"], row["rows"], row["exchange_us"]) == (gpus, rows, exchange)
    }


def split_title(data: style.Json) -> str:
    two, eight = crossovers(data, 2)[28], crossovers(data, 8)[28]
    return (
        f"A draft model of 28 layers is faster split over 2 GPUs from {two:.1f}B parameters on, over 8 from "
        f"{eight:.1f}B; smaller ones are faster whole on every GPU"
    )


def draw_split(data: style.Json) -> Any:
    figure, (x, y, width, height) = style.canvas(
        split_title(data),
        "From which size on a pass of a draft model for one row is faster split over the target's GPUs, by "
        "its layers. An exchange takes 10 us; the bands are from 6 to 20 us.",
        NOTE,
        3.3,
    )
    axis = figure.add_axes((x + 0.06, y + 0.08, width - 0.16, height - 0.09))
    top = max(crossovers(data, 2, exchange=20).values())
    axis.set(xlim=(8, 36), ylim=(0, 1.05 * top), xlabel="layers of the draft model")
    axis.set_ylabel("parameters, billions")
    axis.set_xticks((8, 16, 28, 36))
    curves = []
    for gpus, color in zip((2, 4, 8), COLORS):
        found = crossovers(data, gpus)
        curves.append(Line(f"{gpus} GPUs", [*found], [*found.values()], color))
        low, high = (crossovers(data, gpus, exchange=exchange).values() for exchange in (6, 20))
        axis.fill_between([*found], [*low], [*high], color=color, alpha=0.1, lw=0)
    lines(axis, curves, 0.07)
    return figure


GAIN = Picture(read, gain_title, draw_gain)
ROUTING = Picture(read, routing_title, draw_routing)
DAY = Picture(read, day_title, draw_day)
SPLIT = Picture(read, split_title, draw_split)
