"""What the pictures share: reading results, naming machines, colours, a frame whose title is a sentence.

Invariants: a picture's numbers, also those of its title, come from the JSON it names; text stays text in the
SVG; the background is part of the picture, so that it reads on dark pages; the same JSON gives the same file.
"""

from __future__ import annotations

import json
import logging
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PAPER, INK, MUTED, FAINT = "#fdfcf9", "#1d1d1f", "#5f6066", "#dcd9d1"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8b8c92"  # told apart by all (Okabe and Ito)
FONTS = ["Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"]  # of the same widths, but for the last
WIDTH = 8.0  # inches
LEFT, RIGHT, TOP, BOTTOM = 0.35, 0.3, 0.3, 0.25  # inches of margin around all
LINE = {"title": 0.27, "subtitle": 0.19, "source": 0.14}  # inches

# ---- what is read ------------------------------------------------------------------------------


def load(folder: Path, name: str) -> Json:
    """The results `name`.json; nothing if they are not there."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def machine(environment: Json) -> str:
    """A processor in words, from what `bench/common.py` notes of it."""
    name, _, flags = str(environment.get("cpu", "unknown processor")).partition(" (a")
    for word in ("(R)", "(TM)", " Processor", " CPU"):
        name = name.replace(word, "")
    unit = next((said for flag, said in UNITS.items() if flag in flags), "")
    article = "an" if name[:1].upper() in "AEIOU" else "a"
    return f"{environment.get('cores', '?')} cores of {article} {name} server{unit}"


UNITS = {"amx_bf16": " with AMX", "avx512_bf16": " with avx512_bf16"}


def source(files: Iterable[str], environment: Json) -> str:
    """The small print: which results, of which machine, commit and day."""
    names = ", ".join(f"{name}.json" for name in files)
    return (
        f"Measured on {machine(environment)}, {environment.get('date', 'undated')}, "
        f"commit {environment.get('commit', 'unknown')}. Numbers: bench/results/{names}."
    )


def geometric_mean(values: Iterable[float]) -> float:
    """Of ratios."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def join(words: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


# ---- what is drawn -----------------------------------------------------------------------------


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files, in this style. An optional extra: only pictures import it."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Pictures need matplotlib: pip install '.[plot]'") from None
    matplotlib.use("Agg")
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # of fonts that are not here
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.family": "sans-serif", "font.sans-serif": FONTS, "font.size": 10, "text.color": INK,
            "svg.fonttype": "none", "svg.hashsalt": "nanospec", "figure.facecolor": PAPER,
            "axes.facecolor": PAPER, "axes.edgecolor": GREY, "axes.labelcolor": MUTED,
            "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
            "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
            "text.parse_math": False,
        }
    )  # fmt: skip
    return plt


def canvas(title: str, subtitle: str, note: str, height: float) -> tuple[Any, tuple[float, ...]]:
    """A figure with its texts, and the box that is left for axes, `height` inches high: left, bottom, width
    and height as shares of the figure."""
    lines = {
        "title": textwrap.wrap(title, 58),
        "subtitle": textwrap.wrap(subtitle, 98),
        "source": textwrap.wrap(note, 130),
    }
    tall = {part: len(found) * LINE[part] for part, found in lines.items()}
    head, foot = TOP + tall["title"] + tall["subtitle"] + 0.2, BOTTOM + tall["source"] + 0.15
    total = head + height + foot
    figure = pyplot().figure(figsize=(WIDTH, total))
    looks: dict[str, tuple[float, dict[str, Any]]] = {
        "title": (TOP, {"fontsize": 15.5, "fontweight": "bold"}),
        "subtitle": (TOP + tall["title"] + 0.06, {"fontsize": 10.5, "color": MUTED}),
        "source": (total - BOTTOM - tall["source"], {"fontsize": 7.5, "color": MUTED}),
    }
    for part, (down, look) in looks.items():
        for i, line in enumerate(lines[part]):
            y = 1 - (down + i * LINE[part]) / total
            figure.text(LEFT / WIDTH, y, line, va="top", ha="left", **look)
    return figure, (LEFT / WIDTH, foot / total, 1 - (LEFT + RIGHT) / WIDTH, height / total)


def save(figure: Any, file: Path, title: str) -> None:
    """As SVG, or what the name of the file says; the same figure gives the same bytes."""
    more = {"metadata": {"Date": None, "Title": title}} if file.suffix == ".svg" else {"dpi": 110}
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, **more)
    pyplot().close(figure)
