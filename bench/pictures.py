"""Draw the plots of the documents from the results that are there.

    python -m bench.pictures [--results bench/results] [--out docs/pictures] [--only guessing]

guessing: speed by way of guessing and kind of text (`drafters.json`). over_k: what K guesses bring and cost
(`over_k.json`). peers: tokens per second beside other engines (`cpu.json` and those that add to it).

All numbers come from the JSON. Text stays text in the SVG, the background is part of the picture, so that it
reads on dark pages, and the same JSON gives the same file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]
PAPER, INK, MUTED, FAINT = "#fdfcf9", "#1d1d1f", "#5f6066", "#dcd9d1"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8b8c92"  # told apart by all (Okabe and Ito)
WIDTH = 8.0  # inches
KINDS = {"math_reasoning": "maths", "qa": "questions", "rag": "retrieval", "summarization": "summaries"}
METHODS = {"ngram": "lookup", "medusa": "heads", "draft": "draft model"}
SYSTEMS = {"nanospec": BLUE, "vllm": ORANGE, "transformers": GREY, "llama.cpp": GREEN}


def load(folder: Path, name: str) -> Any:
    """The results `name`.json; nothing if they are not there."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def source(files: Iterable[str], environment: Json) -> str:
    """The small print: which results, of which machine, commit and day."""
    processor = re.sub(r"\((R|TM)\)| Processor| CPU", "", environment["cpu"].partition(" (a")[0])
    unit = next((f" with {flag}" for flag in ("amx_bf16", "avx512_bf16") if flag in environment["cpu"]), "")
    names = ", ".join(f"{name}.json" for name in files)
    return (
        f"{environment['cores']} cores of {processor}{unit}, {environment['date']}, commit "
        f"{environment['commit']}. Numbers: bench/results/{names}."
    )


def pyplot() -> Any:
    """matplotlib.pyplot in this style. matplotlib is an optional extra."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Pictures need matplotlib: pip install '.[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.family": "sans-serif", "font.size": 10, "text.color": INK, "svg.fonttype": "none",
            "svg.hashsalt": "nanospec", "figure.facecolor": PAPER, "axes.facecolor": PAPER,
            "axes.edgecolor": GREY, "axes.labelcolor": MUTED, "axes.spines.top": False,
            "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
        }
    )  # fmt: skip
    return plt


def canvas(title: str, note: str, height: float, columns: int = 1, left: float = 0.1) -> tuple[Any, Any]:
    """A figure with a title and small print, and its axes in a row, `height` inches high."""
    head, foot = textwrap.wrap(title, 58), textwrap.wrap(note, 130)
    above, below = 0.55 + 0.27 * len(head), 0.6 + 0.14 * len(foot)
    total = above + height + below
    figure, axes = pyplot().subplots(1, columns, figsize=(WIDTH, total), sharey=True, squeeze=False)
    top, bottom = 1 - above / total, below / total
    figure.subplots_adjust(left=left, right=0.97, top=top, bottom=bottom, wspace=0.08)
    figure.text(0.03, 1 - 0.2 / total, "\n".join(head), va="top", fontsize=15, fontweight="bold")
    figure.text(0.03, 0.15 / total, "\n".join(foot), va="bottom", fontsize=7.5, color=MUTED)
    return figure, axes[0]


# ---- guessing ------------------------------------------------------------------------------------------


def way_name(way: str) -> str:
    """In words: "ngram tree W=2 K=8" is "lookup, tree of 2, K = 8"."""
    method, _, rest = way.partition(" ")
    name = " and ".join(METHODS[part] for part in method.split("+"))
    shape = re.sub(r"tree W=(\d+) ?", r"tree of \1, ", rest).replace("K=", "K = ")
    return f"{name}, {shape}" if shape else name


def guessing(folder: Path) -> Any:
    """A heat map: ways from the fastest on average to the slowest, kinds from the largest gain to the
    least."""
    found = load(folder, "drafters")
    tables = found["greedy"]
    ways = [way for way, row in tables["chat"].items() if isinstance(row, dict) and way != "none"]
    speed = {(way, kind): table[way]["speedup"]["median"] for kind, table in tables.items() for way in ways}
    mean = {way: math.prod(speed[way, kind] for kind in tables) ** (1 / len(tables)) for way in ways}
    ways.sort(key=lambda way: -mean[way])
    kinds = sorted(tables, key=lambda kind: -speed[ways[0], kind])
    loops = {kind for kind in kinds if tables[kind]["looping_outputs"]}
    best, worst = next(kind for kind in kinds if kind not in loops), kinds[-1]
    gains = [f"{speed[ways[0], k]:.1f} on {KINDS.get(k, k)}" for k in (best, worst)]
    title = (
        f"What guessing gains depends on the text: times {gains[0]}, times {gains[1]} ({way_name(ways[0])})"
    )
    settings = found["settings"]
    note = (
        "Speed over no guessing (small: tokens per step) of one request at a time, greedy; K automatic "
        f"unless given. {source(['drafters'], found['machine'])} {settings['prompts']} prompts of each kind, "
        f"{settings['max_tokens']} tokens each, prompts included; medians of {settings['repeats']} repeats. "
        "Means are geometric. * One output or more ends in a loop, which flatters lookup."
    )
    figure, [axis] = canvas(title, note, 0.4 * len(ways), left=0.26)
    for i, way in enumerate(ways):
        for j, kind in enumerate([*kinds, "mean"]):
            value, left = mean[way] if kind == "mean" else speed[way, kind], j + 0.12 * (kind == "mean")
            color, dark = shade(value)
            axis.add_patch(pyplot().Rectangle((left + 0.02, i + 0.03), 0.96, 0.94, color=color, lw=0))
            look = {"ha": "center", "va": "center", "color": PAPER if dark else INK}
            axis.text(left + 0.5, i + 0.4, f"{value:.2f}×", fontsize=10, weight="bold", **look)
            if kind != "mean":
                tokens = tables[kind][way]["tokens_per_step"]
                axis.text(left + 0.5, i + 0.78, f"{tokens:.2f}", fontsize=7.5, **look)
    axis.set(xlim=(0, len(kinds) + 1.12), ylim=(len(ways), 0))
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, labelsize=8.5)
    names = [KINDS.get(kind, kind) + "*" * (kind in loops) for kind in kinds]
    axis.set_xticks([*(j + 0.5 for j in range(len(kinds))), len(kinds) + 0.62], [*names, "mean"])
    axis.set_yticks([i + 0.5 for i in range(len(ways))], list(map(way_name, ways)))
    return figure


def shade(speedup: float) -> tuple[tuple[float, ...], bool]:
    """From orange (slower) over the paper (no change) to blue, and whether ink on it must be light."""
    from matplotlib.colors import to_rgb

    share = min(math.log(speedup) / math.log(2.5 if speedup >= 1 else 0.75), 1.0)
    base, full = to_rgb("#f0eee8"), to_rgb("#00507d" if speedup >= 1 else ORANGE)
    return tuple(a + (b - a) * share for a, b in zip(base, full)), share > 0.6


# ---- over K --------------------------------------------------------------------------------------------


def over_k(folder: Path) -> Any:
    """Tokens per step and the time of a step over K, as multiples of a step without guesses."""
    found = load(folder, "over_k")
    rows: dict[tuple[str, int], dict[str, Json]] = {}
    for row in found["rows"]:
        rows.setdefault((row["kind"], row["batch"]), {})[row["k"]] = row
    kinds, batches = (list(dict.fromkeys(names)) for names in zip(*rows))
    best, reached = {}, []
    for case, by_k in rows.items():
        speeds = {k: row["speedup"]["median"] for k, row in by_k.items() if k != "auto"}
        best[case] = max(speeds, key=lambda k: speeds[k])
        reached.append(by_k["auto"]["speedup"]["median"] / speeds[best[case]])
    span = sorted(map(int, best.values()))
    title = (
        f"The best number of guesses is anywhere from {span[0]} to {span[-1]}; the automatic choice reaches "
        f"{min(reached):.0%} to {max(reached):.0%} of its speed"
    )
    settings = found["settings"]
    note = (
        "Solid: tokens per step, dashed: the time of a step, as multiples of a step without guesses; the gap "
        "is the speed-up, circles mark the widest; below a name is the speed-up of the automatic choice. "
        f"{source(['over_k'], found['environment'])} {found['model']} in bf16, lookup, greedy; at least "
        f"{settings['prompts']} prompts of each kind, {settings['max_tokens']} tokens each, without the time "
        f"of prompts. Medians of {settings['rounds']} rounds in which all K took turns, step by step."
    )
    figure, axes = canvas(title, note, 3.4, columns=len(batches))
    for axis, batch in zip(axes, batches):
        for kind, color in zip(kinds, (BLUE, ORANGE, GREEN)):
            by_k = rows[kind, batch]
            ks = sorted(int(k) for k in by_k if k != "auto")
            tokens = [by_k[str(k)]["tokens_per_step"] for k in ks]
            times = [n / by_k[str(k)]["speedup"]["median"] for k, n in zip(ks, tokens)]
            axis.plot(ks, tokens, "o-", color=color, lw=1.9, ms=3.2)
            axis.plot(ks, times, "--", color=color, lw=1.2)
            at = int(best[kind, batch])
            axis.plot(at, tokens[ks.index(at)], "o", color=PAPER, mec=color, mew=1.9, ms=7)
            label = f"{kind}\n{by_k['auto']['speedup']['median']:.2f}×"
            look = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": color}
            axis.annotate(label, (ks[-1], tokens[-1]), (6, 0), **look)
        ticks = (1, 1.5, 2, 3, 4, 6, 8)
        axis.set(yscale="log", xlim=(-0.9, 1.45 * ks[-1]), xticks=[0, 1, 2, 4, 8, 12, 16], xlabel="K")
        axis.set_yticks(ticks, [f"{t:g}×" for t in ticks])
        axis.minorticks_off()
        axis.grid(axis="y", color=FAINT, lw=0.7)
        said = "One request at a time" if batch == 1 else f"{batch} requests at once"
        axis.set_title(said, loc="left", fontsize=11, weight="bold")
    return figure


# ---- peers ---------------------------------------------------------------------------------------------


def peers(folder: Path) -> Any:
    """Tokens per second by requests at once. The first file that has a system's row counts, as its ratios are
    of processes that took turns; files of another processor are left out."""
    lanes: dict[tuple[int, str], dict[str, Json]] = {}
    first, files = load(folder, "cpu")["short"], list[str]()
    for name in ("cpu", "cpu_64", "cpu_others"):
        part = load(folder, name).get("short", {})
        if part and part["machine"]["cpu"] == first["machine"]["cpu"]:
            files.append(name)
            for row in part["table"]:
                batch = int(row["case"].removeprefix("B=").partition(",")[0])
                lanes.setdefault((batch, row["way"]), {}).setdefault(row["system"], row)
    order = sorted(lanes, key=lambda lane: (lane[0], lane[1] != "plain"))
    ratios = [lanes[lane]["vllm"]["nanospec_ratio"]["median"] for lane in order]
    title = (
        f"With {order[0][0]} request or {order[-1][0]} at once, nanospec writes {min(ratios):.1f} to "
        f"{max(ratios):.1f} times as fast as vLLM on the same {first['machine']['cores']} cores"
    )
    settings = first["settings"]
    note = (
        f"Tokens per second of all requests together. {source(files, first['machine'])} "
        f"{settings['model']} in bf16, prompts of 81 to 265 tokens (code edits, function bodies, maths), "
        f"{settings['max_tokens']} tokens each, greedy, prompts included. Medians of rounds in which engines "
        "took turns, and their range. vLLM, transformers and llama.cpp guess what was fastest for each. "
        "llama.cpp runs the original 4-bit file, another and smaller model, built without AMX."
    )
    figure, [axis] = canvas(title, note, 0.42 * len(order), left=0.29)
    for i, lane in enumerate(order):
        for system, row in lanes[lane].items():
            low, middle, high = (row["tokens_per_second"][key] for key in ("min", "median", "max"))
            axis.plot([low, high], [i, i], color=SYSTEMS[system], lw=1.6)
            axis.plot(
                middle, i, "o", color=SYSTEMS[system], ms=7, mec=PAPER, label=system if i == 0 else None
            )
        ratio, top = (
            lanes[lane]["vllm"]["nanospec_ratio"],
            lanes[lane]["nanospec"]["tokens_per_second"]["max"],
        )
        said = f"{ratio['median']:.2f}× ({ratio['min']:.2f}–{ratio['max']:.2f})"
        look = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": BLUE}
        axis.annotate(said, (top, i), (9, 0), **look)
    ticks = (20, 50, 100, 200, 500, 1000)
    axis.set(xscale="log", xlim=(16, 4500), ylim=(len(order) - 0.4, -0.6))
    axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axis.minorticks_off()
    axis.grid(axis="x", color=FAINT, lw=0.7)
    names = [
        f"{n} request{'s at once' * (n > 1)}, {'guessing' if way != 'plain' else way}" for n, way in order
    ]
    axis.set_yticks(range(len(order)), names)
    axis.legend(loc="upper right", frameon=False, fontsize=9)
    return figure


PICTURES = {"guessing": guessing, "over_k": over_k, "peers": peers}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=[*PICTURES])
    args = parser.parse_args(argv)
    for name in args.only:
        figure = PICTURES[name](args.results)
        figure.savefig(args.out / f"{name}.svg", metadata={"Date": None, "Title": name})
        pyplot().close(figure)
        print(args.out / f"{name}.svg")


if __name__ == "__main__":
    main()
