"""What guesses bring and cost, over their number, and how many the automatic choice takes (`over_k.json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from . import style

LARGEST = 420  # square points that all steps of a row take
COLORS = (style.BLUE, style.ORANGE, style.GREEN)


class Point(NamedTuple):
    """One K: tokens per step, and the time of a step, as a multiple of one without guesses, with its range;
    tokens over time is the speed-up."""

    k: str
    tokens: float
    time: float
    low: float
    high: float

    @property
    def speedup(self) -> float:
        return self.tokens / self.time


class Curve(NamedTuple):
    """One kind of text, so many requests at once. `chosen` are the shares of the steps of the automatic
    choice by their number of guesses."""

    kind: str
    batch: int
    fixed: list[Point]
    auto: Point | None
    chosen: dict[int, float]

    @property
    def best(self) -> Point:
        """The fastest fixed K, 0 included."""
        return max(self.fixed, key=lambda point: point.speedup)


class Data(NamedTuple):
    curves: list[Curve]
    machine: style.Json
    settings: style.Json
    model: str


def read(folder: Path) -> Data | None:
    found = style.load(folder, "over_k")
    rows = found.get("rows", [])
    curves = []
    for kind, batch in dict.fromkeys((row["kind"], row["batch"]) for row in rows):
        own = {row["k"]: row for row in rows if (row["kind"], row["batch"]) == (kind, batch)}
        auto = own.pop("auto", None)
        fixed = sorted(map(_point, own.values()), key=lambda point: int(point.k))
        if fixed:
            chosen = shares(auto["guesses"]) if auto else {}
            curves.append(Curve(kind, batch, fixed, _point(auto) if auto else None, chosen))
    if not curves:
        return None
    return Data(curves, found.get("environment", {}), found.get("settings", {}), found.get("model", ""))


def _point(row: style.Json) -> Point:
    tokens, speed = row["tokens_per_step"], row["speedup"]
    time, low, high = (tokens / speed[name] for name in ("median", "max", "min"))
    return Point(row["k"], tokens, time, low, high)


def shares(counts: dict[str, int]) -> dict[int, float]:
    """Of numbers of steps by their guesses."""
    return {int(k): n / sum(counts.values()) for k, n in counts.items()}


def title(data: Data) -> str:
    """How the automatic choice compares with the best fixed K of every curve."""
    best = sorted({int(c.best.k) for c in data.curves})
    span = f"is anywhere from {best[0]} to {best[-1]}" if len(best) > 1 else f"is {best[0]}"
    reached = [c.auto.speedup / c.best.speedup for c in data.curves if c.auto]
    if not reached:
        return f"The best number of guesses {span}"
    low, high = f"{min(reached):.0%}", f"{max(reached):.0%}"
    said = high if low == high else f"{low[:-1]} to {high}"
    return f"The best number of guesses {span}; the automatic choice reaches {said} of its speed"


def draw(data: Data) -> Any:
    figure, (x, y, width, height) = style.canvas(
        title(data),
        "Tokens per step (solid) and the time of a step (dashed) over K, the number of guesses. Both "
        "are multiples of a step without guesses: the gap is the speed-up; circles mark the widest.",
        _note(data),
        4.6,
    )
    batches = sorted({curve.batch for curve in data.curves})
    batches = [batches[0], batches[-1]] if len(batches) > 1 else batches
    names, gap = 0.1, 0.03
    each = (width - names - gap * (len(batches) - 1)) / len(batches)
    upper = None
    for i, batch in enumerate(batches):
        left, strip = x + names + i * (each + gap), 0.28 * height
        upper = figure.add_axes((left, y + strip + 0.09 * height, each, 0.56 * height), sharey=upper)
        lower = figure.add_axes((left, y, each, strip), sharex=upper)
        _scales(upper, batch, data)
        _strip(lower, [c.kind for c in data.curves if c.batch == batch], named=i == 0)
        for row, curve in enumerate(c for c in data.curves if c.batch == batch):
            _curve(upper, curve, _color(data, curve))
            _choices(lower, row, curve, _color(data, curve))
        if i:
            upper.tick_params(labelleft=False)
    return figure


def _note(data: Data) -> str:
    prompts, most, rounds = (data.settings.get(name, "?") for name in ("prompts", "max_tokens", "rounds"))
    return (
        f"{style.source(['over_k'], data.machine)} {data.model} in bf16, lookup, greedy; at least {prompts} "
        f"prompts of each kind, {most} tokens each, without the time of prompts. Medians of {rounds} rounds "
        "in which all K took turns, step by step; bands are the range of the rounds."
    )


def _color(data: Data, curve: Curve) -> str:
    kinds = list(dict.fromkeys(c.kind for c in data.curves))
    return COLORS[kinds.index(curve.kind) % len(COLORS)]


def _scales(axis: Any, batch: int, data: Data) -> None:
    points = [point for curve in data.curves for point in curve.fixed]
    low, high = (pick(at for p in points for at in (p.tokens, p.time)) for pick in (min, max))
    most = max(int(p.k) for p in points)
    axis.set(yscale="log", ylim=(low / 1.08, high * 1.15), xlim=(-0.9, most * 1.28))
    ticks = [t for t in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if t < high * 1.15]
    axis.set_yticks(ticks, [f"{t:g}×" for t in ticks])
    axis.set_xticks([k for k in (0, 1, 2, 4, 8, 12, 16, 24, 32) if k <= most])
    axis.minorticks_off()
    axis.tick_params(axis="x", labelsize=9)
    axis.grid(axis="y", color=style.FAINT, lw=0.7)
    axis.set_axisbelow(True)
    many = "One request at a time" if batch == 1 else f"{batch} requests at once"
    axis.set_title(many, loc="left", fontsize=11, weight="bold", color=style.INK)


def _curve(axis: Any, curve: Curve, color: str) -> None:
    x = [int(p.k) for p in curve.fixed]
    bounds = [p.low for p in curve.fixed], [p.high for p in curve.fixed]
    axis.fill_between(x, *bounds, color=color, alpha=0.12, lw=0)
    axis.plot(x, [p.time for p in curve.fixed], "--", color=color, lw=1.2)
    axis.plot(x, [p.tokens for p in curve.fixed], "o-", color=color, lw=1.9, ms=3.2)
    best = curve.best
    axis.plot(int(best.k), best.tokens, "o", color=style.PAPER, mec=color, mew=1.9, ms=7)
    last = curve.fixed[-1]
    look = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": color}
    axis.annotate(curve.kind, (int(last.k), last.tokens), (6, 0), **look)


def _strip(axis: Any, kinds: list[str], named: bool) -> None:
    axis.set(ylim=(len(kinds) - 0.4, -1.3), yticks=[])
    axis.spines[:].set_visible(False)
    axis.patch.set_visible(False)  # what it says above the rows reaches into the next one
    axis.tick_params(axis="x", length=0, labelbottom=False)
    if named:
        said = "How many guesses the automatic choice takes, by share of its steps, and its speed-up"
        axis.text(0, -0.85, said, fontsize=9.5)
    for row, kind in enumerate(kinds):
        axis.axhline(row, color=style.FAINT, lw=0.7, zorder=0)
        if named:
            look = {"transform": axis.get_yaxis_transform(), "ha": "right", "va": "center", "fontsize": 9.5}
            axis.text(-0.05, row, kind, **look)


def _choices(axis: Any, row: int, curve: Curve, color: str) -> None:
    sizes = [LARGEST * share for share in curve.chosen.values()]
    axis.scatter([*curve.chosen], [row] * len(sizes), sizes, color=color, lw=0, alpha=0.85)
    if curve.auto:
        end = int(curve.fixed[-1].k)
        look = {"textcoords": "offset points", "va": "center", "weight": "bold", "color": color}
        axis.annotate(f"{curve.auto.speedup:.2f}×", (end, row), (16, 0), **look)
