"""Speed over the number of requests against other engines: `cpu.json`, and of the same processor what
`cpu_64.json` and `cpu_others.json` add (all by `bench/cpu.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from . import style

FILES = ("cpu", "cpu_64", "cpu_others")
OURS, MAIN = "nanospec", "vllm"
NAMES = {"vllm": "vLLM"}
COLORS = {"nanospec": style.BLUE, "vllm": style.ORANGE}
WAYS = {"plain": "plain", "n-gram": "guessing"}


class Mark(NamedTuple):
    """Tokens per second, with their range."""

    median: float
    low: float
    high: float


class Lane(NamedTuple):
    """One way with so many requests at once: every engine's speed, and how many times vLLM's ours is."""

    batch: int
    way: str
    marks: dict[str, Mark]
    ratio: Mark | None


class Data(NamedTuple):
    """`others` are the engines besides ours and vLLM, `tried` what vLLM was let guess, of which the fastest
    counts, `files` those that were used."""

    lanes: list[Lane]
    others: list[str]
    tried: list[str]
    files: list[str]
    machine: style.Json
    settings: style.Json


def read(folder: Path) -> Data | None:
    """Greedy answers to short prompts. The first file that has an engine's row counts, as its ratios are of
    processes that took turns; files from another processor are left out."""
    lanes: dict[tuple[int, str], Lane] = {}
    about: style.Json = {}
    files = []
    for name in FILES:
        part = style.load(folder, name).get("short")
        if not part or (about and part["machine"]["cpu"] != about["machine"]["cpu"]):
            continue
        about = about or part
        files.append(name)
        for row in part["table"]:
            batch = int(row["case"].removeprefix("B=").partition(",")[0])
            lane = lanes.setdefault((batch, row["way"]), Lane(batch, row["way"], {}, None))
            lane.marks.setdefault(row["system"], _mark(row["tokens_per_second"]))
            if row["system"] == MAIN and "nanospec_ratio" in row and lane.ratio is None:
                lanes[batch, row["way"]] = lane._replace(ratio=_mark(row["nanospec_ratio"]))
    ordered = [lanes[at] for at in sorted(lanes, key=lambda at: (at[0], [*WAYS, at[1]].index(at[1])))]
    others = [name for name in dict.fromkeys(n for lane in ordered for n in lane.marks) if name not in COLORS]
    if not ordered:
        return None
    tried = {
        guess: 0 for case, rates in about.get("tried", {}).items() if case.startswith(MAIN) for guess in rates
    }
    return Data(ordered, others, [*tried], files, about["machine"], about["settings"])


def _mark(spread: dict[str, float]) -> Mark:
    return Mark(spread["median"], spread["min"], spread["max"])


def title(data: Data) -> str:
    ratios = [lane.ratio.median for lane in data.lanes if lane.ratio]
    if not ratios:
        return "How fast nanospec writes"
    batches = [lane.batch for lane in data.lanes if lane.ratio]
    return (
        f"With {min(batches)} request or {max(batches)} at once, nanospec writes {min(ratios):.1f} to "
        f"{max(ratios):.1f} times as fast as vLLM on the same {data.machine.get('cores', '')} cores"
    )


def draw(data: Data) -> Any:
    places = _places(data)
    figure, (x, y, width, height) = style.canvas(
        title(data),
        "Tokens per second of all requests together, on a scale on which equal steps are equal ratios.",
        _note(data),
        0.45 + 0.36 * places[-1],
    )
    axis = figure.add_axes((x + 0.265, y + 0.04, width - 0.265, height - 0.04))
    speeds = [mark for lane in data.lanes for mark in lane.marks.values()]
    low, high = min(m.low for m in speeds) / 1.5, max(m.high for m in speeds) * 2.9
    axis.set(xscale="log", xlim=(low, high), ylim=(places[-1] + 0.6, 0.1), yticks=[])
    ticks = [m * 10**e for e in range(5) for m in (1, 2, 5) if low < m * 10**e < high / 2.5]
    axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axis.minorticks_off()
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=style.FAINT, lw=0.7)
    axis.set_axisbelow(True)
    look = {"transform": axis.get_yaxis_transform(), "ha": "right", "va": "center"}
    for i, (lane, place) in enumerate(zip(data.lanes, places)):
        if i == 0 or lane.batch != data.lanes[i - 1].batch:
            many = f"{lane.batch} request{'s at once' if lane.batch > 1 else ''}"
            axis.text(-0.15, place, many, weight="bold", **look)
        axis.text(-0.015, place, WAYS.get(lane.way, lane.way), color=style.MUTED, **look)
        _lane(axis, lane, place)
        if i == 0:
            for name, color in COLORS.items():
                if name in lane.marks:
                    above = {"ha": "center", "va": "bottom", "color": color, "weight": "bold"}
                    axis.text(lane.marks[name].median, place - 0.3, NAMES.get(name, name), **above)
    return figure


def _note(data: Data) -> str:
    model, most = (data.settings.get(name, "?") for name in ("model", "max_tokens"))
    note = (
        f"{style.source(data.files, data.machine)} {model} in bf16, prompts of 81 to 265 tokens (code edits, "
        f"function bodies, maths), {most} tokens each, greedy, prompts included. Medians of rounds in which "
        "the engines took turns, and the range of the rounds, of the ratios in brackets."
    )
    if data.tried:
        note += f" vLLM guesses as was fastest for it, case by case: {' or '.join(data.tried)}."
    if "llama.cpp" in data.others:
        note += " llama.cpp runs the original 4-bit file, another and smaller model, built without AMX."
    return note


def _places(data: Data) -> list[float]:
    """How far down each lane lies; those with names below their marks need more room."""
    places, at = [], 0.8
    for i, lane in enumerate(data.lanes):
        places.append(at)
        new = i + 1 < len(data.lanes) and data.lanes[i + 1].batch != lane.batch
        at += 0.9 + 0.4 * new + 0.3 * bool(lane.marks.keys() & set(data.others))
    return places


def _lane(axis: Any, lane: Lane, place: float) -> None:
    ours = lane.marks.get(OURS)
    if lane.ratio and ours:
        ends = [lane.marks[MAIN].median, ours.median]
        axis.plot(ends, [place, place], color=style.FAINT, lw=5, solid_capstyle="butt", zorder=1)
    for name, mark in lane.marks.items():
        color, size = COLORS.get(name, style.GREY), 8 if name in COLORS else 6
        axis.plot([mark.low, mark.high], [place, place], color=color, lw=1.6, zorder=2)
        axis.plot(mark.median, place, "o", color=color, ms=size, mec=style.PAPER, zorder=3)
    others = sorted(lane.marks.keys() - COLORS.keys(), key=lambda name: lane.marks[name])
    close = len(others) == 2 and lane.marks[others[1]].median < 1.8 * lane.marks[others[0]].median
    for name, side in zip(others, ("right", "left") if close else ["center"] * len(others)):
        at = lane.marks[name].median * {"right": 1.03, "left": 0.97, "center": 1.0}[side], place + 0.24
        axis.text(*at, NAMES.get(name, name), va="top", ha=side, fontsize=8.5, color=style.MUTED)
    if lane.ratio and ours:
        said = axis.annotate(
            f"{lane.ratio.median:.2f}×", (ours.high, place), (9, 0), textcoords="offset points", va="center",
            weight="bold", color=style.BLUE,
        )  # fmt: skip
        axis.annotate(
            f"({lane.ratio.low:.2f}–{lane.ratio.high:.2f})", (1, 0.5), (4, 0), xycoords=said,
            textcoords="offset points", va="center", fontsize=8, color=style.MUTED,
        )  # fmt: skip
