"""Draw docs/pictures/over_k.svg, the cost and benefit of K drafts, from `over_k.json`.

    python -m bench.pictures

All numbers come from the JSON. Text stays text in the SVG, which has a background to be readable on dark
pages. The output is deterministic.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]
PAPER, INK, MUTED, FAINT = "#fdfcf9", "#1d1d1f", "#5f6066", "#dcd9d1"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8b8c92"  # Okabe and Ito: color-blind safe
WIDTH = 8.0  # inches


def source(environment: Json) -> str:
    """Return the source note: machine, date, commit and results file."""
    processor = re.sub(r"\((R|TM)\)| Processor| CPU", "", environment["cpu"].partition(" (a")[0])
    unit = next((f" with {flag}" for flag in ("amx_bf16", "avx512_bf16") if flag in environment["cpu"]), "")
    return (
        f"{environment['cores']} cores of {processor}{unit}, {environment['date']}, commit "
        f"{environment['commit']}. Numbers: bench/results/over_k.json."
    )


def pyplot() -> Any:
    """Return matplotlib.pyplot with the style applied. matplotlib is an optional dependency."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Pictures require matplotlib; install it with: pip install '.[plot]'") from None
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


def canvas(title: str, note: str, height: float, columns: int) -> tuple[Any, Any]:
    """Return a figure with a title and a note, and its axes in a row, `height` inches high."""
    head, foot = textwrap.wrap(title, 58), textwrap.wrap(note, 130)
    above, below = 0.55 + 0.27 * len(head), 0.6 + 0.14 * len(foot)
    total = above + height + below
    figure, axes = pyplot().subplots(1, columns, figsize=(WIDTH, total), sharey=True, squeeze=False)
    top, bottom = 1 - above / total, below / total
    figure.subplots_adjust(left=0.1, right=0.97, top=top, bottom=bottom, wspace=0.08)
    figure.text(0.03, 1 - 0.2 / total, "\n".join(head), va="top", fontsize=15, fontweight="bold")
    figure.text(0.03, 0.15 / total, "\n".join(foot), va="bottom", fontsize=7.5, color=MUTED)
    return figure, axes[0]


def over_k() -> Any:
    """Plot tokens per step and time per step over K, relative to a step without speculation."""
    results = json.loads((ROOT / "bench" / "results" / "over_k.json").read_text(encoding="utf-8"))
    rows: dict[tuple[str, int], dict[str, Json]] = {}
    for row in results["rows"]:
        rows.setdefault((row["kind"], row["batch"]), {})[row["k"]] = row
    kinds, batches = (list(dict.fromkeys(names)) for names in zip(*rows))
    best, reached = {}, []
    for case, by_k in rows.items():
        speeds = {k: row["speedup"]["median"] for k, row in by_k.items() if k != "auto"}
        best[case] = max(speeds, key=lambda k: speeds[k])
        reached.append(by_k["auto"]["speedup"]["median"] / speeds[best[case]])
    span = sorted(map(int, best.values()))
    title = (
        f"The best fixed K ranges from {span[0]} to {span[-1]}; automatic K runs at {min(reached):.0%} to "
        f"{max(reached):.0%} of its speed"
    )
    settings = results["settings"]
    note = (
        "Solid: tokens per step. Dashed: time per step. Both are relative to a step without speculation; the "
        "gap between them is the speedup, and a circle marks the best K. Below each name: the speedup of "
        f"automatic K. {source(results['environment'])} {results['model']} in bf16, n-gram "
        f"lookup, greedy; at least {settings['prompts']} prompts of each kind, {settings['max_tokens']} "
        f"tokens each, prefill excluded. Medians of {settings['rounds']} rounds; all K took turns."
    )
    figure, axes = canvas(title, note, 3.4, len(batches))
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
            style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": color}
            axis.annotate(label, (ks[-1], tokens[-1]), (6, 0), **style)
        ticks = (1, 1.5, 2, 3, 4, 6, 8)
        axis.set(yscale="log", xlim=(-0.9, 1.45 * ks[-1]), xticks=[0, 1, 2, 4, 8, 12, 16], xlabel="K")
        axis.set_yticks(ticks, [f"{t:g}×" for t in ticks])
        axis.minorticks_off()
        axis.grid(axis="y", color=FAINT, lw=0.7)
        heading = "One request" if batch == 1 else f"{batch} concurrent requests"
        axis.set_title(heading, loc="left", fontsize=11, weight="bold")
    return figure


if __name__ == "__main__":
    path = ROOT / "docs" / "pictures" / "over_k.svg"
    over_k().savefig(path, metadata={"Date": None, "Title": "over_k"})
    print(path)
