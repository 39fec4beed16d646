"""Speed by way of guessing and kind of text, as a heat map (`drafters.json`, by `bench/drafters.py`)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from . import style

KINDS = {"math_reasoning": "maths", "qa": "questions", "rag": "retrieval", "summarization": "summaries"}
METHODS = {"ngram": "lookup", "medusa": "Medusa heads", "draft": "draft model"}
WORST, BEST = 0.75, 2.5  # speed-ups of the strongest colours


class Cell(NamedTuple):
    """One way on one kind of text: speed over no guessing, with its range, and tokens per step."""

    speedup: float
    low: float
    high: float
    tokens: float


class Data(NamedTuple):
    """Ways from the fastest on average to the slowest, kinds from what gains most to what gains least.

    `means` has the ways that were measured on all kinds (geometric means), `loops` the kinds in which some
    output ends in a loop, which flatters guessing.
    """

    ways: list[str]
    kinds: list[str]
    cells: dict[tuple[str, str], Cell]
    means: dict[str, float]
    loops: set[str]
    machine: style.Json
    settings: style.Json


def read(folder: Path) -> Data | None:
    found = style.load(folder, "drafters")
    cells: dict[tuple[str, str], Cell] = {}
    loops = set()
    for kind, table in found.get("greedy", {}).items():
        if table.get("looping_outputs"):
            loops.add(kind)
        for way, row in table.items():
            if isinstance(row, dict) and way != "none":
                low, middle, high = (row["speedup"][name] for name in ("min", "median", "max"))
                cells[way, kind] = Cell(middle, low, high, row["tokens_per_step"])
    if not cells:
        return None
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    ways = list(dict.fromkeys(way for way, _ in cells))
    whole = [way for way in ways if all((way, kind) in cells for kind in kinds)]
    means = {way: style.geometric_mean(cells[way, kind].speedup for kind in kinds) for way in whole}
    ways.sort(key=lambda way: -means.get(way, 0.0))
    gain = {kind: max(cell.speedup for (_, k), cell in cells.items() if k == kind) for kind in kinds}
    kinds.sort(key=lambda kind: -gain[kind])
    return Data(ways, kinds, cells, means, loops, found.get("machine", {}), found.get("settings", {}))


def way_name(way: str) -> str:
    """In words: "ngram tree W=2 K=8" is "lookup, tree of 2, K = 8"."""
    method, _, rest = way.partition(" ")
    first, *later = [METHODS.get(part, part) for part in method.split("+")]
    name = style.join([first, *(part.removeprefix("Medusa ") for part in later)])
    shape = re.sub(r"tree W=(\d+) ?", r"tree of \1, ", rest).replace("K=", "K = ")
    return f"{name}, {shape}" if shape else name


def kind_name(kind: str) -> str:
    return KINDS.get(kind, kind)


def title(data: Data) -> str:
    """What the best way of guessing gains where, loops set aside."""
    best = data.ways[0]
    kinds = [k for k in data.kinds if (best, k) in data.cells and k not in data.loops] or data.kinds
    speed = {kind: data.cells[best, kind].speedup for kind in kinds if (best, kind) in data.cells}
    low, high = min(speed, key=speed.__getitem__), max(speed, key=speed.__getitem__)
    return (
        f"How much guessing gains depends on the text: {speed[high]:.1f} times the speed on "
        f"{kind_name(high)}, {speed[low]:.1f} on {kind_name(low)} ({way_name(best)})"
    )


def draw(data: Data) -> Any:
    figure, (x, y, width, height) = style.canvas(
        title(data),
        "Speed over no guessing (small: tokens per step) of one request at a time. Of two ways, the second "
        "guesses where the first finds nothing. How many guesses: chosen automatically unless K is given.",
        _note(data),
        0.42 + 0.38 * len(data.ways),
    )
    names = 0.25
    axis = figure.add_axes((x + names, y, width - names, height))
    lefts = {kind: float(j) for j, kind in enumerate(data.kinds)}
    if data.means:
        lefts["mean"] = len(data.kinds) + 0.12  # a little apart
    axis.set(xlim=(0, max(lefts.values()) + 1), ylim=(len(data.ways), -0.55))
    axis.axis("off")
    for kind, left in lefts.items():
        look = {
            "ha": "center",
            "va": "bottom",
            "fontsize": 9,
            "weight": "bold" if kind == "mean" else "normal",
        }
        axis.text(left + 0.5, -0.12, kind_name(kind) + "*" * (kind in data.loops), **look)
    for i, way in enumerate(data.ways):
        look = {"ha": "right", "va": "center", "fontsize": 9.5, "weight": "normal" if i else "bold"}
        axis.text(-0.12, i + 0.5, way_name(way), **look)
        for kind in data.kinds:
            if (way, kind) in data.cells:
                cell = data.cells[way, kind]
                _tile(axis, i, lefts[kind], cell.speedup, f"{cell.tokens:.2f}")
        if way in data.means:
            _tile(axis, i, lefts["mean"], data.means[way])
    return figure


def _note(data: Data) -> str:
    apart = max(max(cell.high / cell.speedup, cell.speedup / cell.low) for cell in data.cells.values()) - 1
    prompts, most, repeats = (data.settings.get(name, "?") for name in ("prompts", "max_tokens", "repeats"))
    note = (
        f"{style.source(['drafters'], data.machine)} {prompts} prompts of each kind, {most} tokens each, "
        f"prompts included; medians of {repeats} repeats, which lie within {apart:.0%} of them. Means are "
        "geometric."
    )
    return note + " * One output or more ends in a loop, which flatters lookup." * bool(data.loops)


def _tile(axis: Any, row: int, left: float, speedup: float, below: str = "") -> None:
    color, dark = shade(speedup)
    axis.add_patch(style.pyplot().Rectangle((left + 0.02, row + 0.03), 0.96, 0.94, color=color, lw=0))
    ink = style.PAPER if dark else style.INK
    look = {"ha": "center", "color": ink}
    y = row + (0.36 if below else 0.5)
    axis.text(left + 0.5, y, f"{speedup:.2f}×", va="center", fontsize=11, weight="bold", **look)
    if below:
        axis.text(left + 0.5, row + 0.76, below, va="center", fontsize=7.5, **look)


def shade(speedup: float) -> tuple[tuple[float, ...], bool]:
    """From orange (slower) over the paper (no change) to blue, and whether ink on it must be light."""
    from matplotlib.colors import to_rgb

    far = math.log(max(speedup, 1e-3)) / math.log(BEST if speedup >= 1 else WORST)
    share = min(max(far, 0.0), 1.0)
    base, full = to_rgb("#f0eee8"), to_rgb("#00507d" if speedup >= 1 else style.ORANGE)
    return tuple(a + (b - a) * share for a, b in zip(base, full)), share > 0.6
