"""Measured steps and prompts under the roof that memory and matrix products set, on a CPU.

The roof is what PyTorch's sums read and the engine's products compute (`reading.json`); under it lie steps by
the tokens they score (`automatic.json`), prompts and other engines (`cpu.json`). All of it was measured: of a
GPU there are computed figures only (`roofline.json`), which are not drawn. FLOPs are counted from the model's
shape, bytes are its bf16 weights, read once a step.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import streamed_bytes
from nanospec.apps.cli.account import account
from nanospec.apps.cli.shapes import SHAPES

from . import style

MODEL = SHAPES["smollm2-135m"]  # what the benchmarks run unless told otherwise
NAMES = {"vllm": "vLLM"}
STEP, PROMPT = "B=1, 200", "first token, 1000"  # cases of `bench/cpu.py`
FEW = 16  # tokens: as many as one request with 15 guesses scores
Quartiles = tuple[float, float, float]


class Point(NamedTuple):
    """A step, or a prompt: FLOPs per byte of weights, GFLOP/s, and what it took."""

    system: str
    tokens: int
    intensity: float
    gflops: float
    ms: float
    prompt: bool = False


class Data(NamedTuple):
    """`memory` is in GB/s and `products` in GFLOP/s, where they were measured: quartiles."""

    points: list[Point]
    memory: Quartiles
    products: Quartiles | None
    files: list[str]
    machine: style.Json


def read(folder: Path) -> Data | None:
    reading, steps = style.load(folder, "reading"), style.load(folder, "automatic")
    if not reading:
        return None
    here = reading["environment"]
    files, points = ["reading"], []
    if steps.get("step_ms_by_tokens") and steps["environment"]["cpu"] == here["cpu"]:
        files.append("automatic")
        points += [point("nanospec", int(n), ms) for n, ms in steps["step_ms_by_tokens"].items()]
    for name in ("cpu", "cpu_others"):
        parts = style.load(folder, name).values()
        rows = [r for p in parts if p["machine"]["cpu"] == here["cpu"] for r in p.get("table", [])]
        known = {(p.system, p.prompt) for p in points}
        new = [p for p in map(of_row, rows) if p and (p.system, p.prompt) not in known]
        points += new
        files += [name] * bool(new)
    products = reading.get("product_gflop_per_s")
    found = quartiles(products) if products else None
    return Data(points, quartiles(reading["sum_gb_per_s"]), found, files, here) if points else None


def of_row(row: style.Json) -> Point | None:
    """What a row of the comparison says of one request without guesses."""
    if row["way"] != "plain":
        return None
    if row["case"] == PROMPT:
        return point(row["system"], 1000, 1e3 / row["tokens_per_second"]["median"], prompt=True)
    if row["case"] == STEP and "bandwidth_share" in row:  # with bf16 weights
        return point(row["system"], 1, 1e3 / row["decode_tokens_per_second"]["median"])
    return None


def point(system: str, tokens: int, ms: float, prompt: bool = False) -> Point:
    """Of a prompt, the head scores the last token alone."""
    step, one = (account(MODEL, 1, n - 1, context=tokens // 2 if prompt else 1) for n in (tokens, 1))
    flops = step.flops
    if prompt:
        flops += sum(k.flops for k in one.kernels if k.part == "head")
        flops -= sum(k.flops for k in step.kernels if k.part == "head")
    return Point(system, tokens, flops / streamed_bytes(MODEL), flops / ms / 1e6, ms, prompt)


def quartiles(values: list[float]) -> Quartiles:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def title(data: Data) -> str:
    steps = {p.tokens: p for p in data.points if p.system == "nanospec" and not p.prompt}
    few = max((n for n in steps if n <= FEW), default=1)
    if few == 1 or 1 not in steps:
        return "Memory sets the pace of small steps"
    return (
        f"Memory sets the pace: a step of {few} tokens takes {steps[few].ms / steps[1].ms:.2f} times as long "
        "as a step of 1"
    )


def draw(data: Data) -> Any:
    figure, (x, y, width, height) = style.canvas(
        title(data),
        "Arithmetic done per second over arithmetic per byte of weights, which is about the number of tokens "
        "that a step scores. Both scales are logarithmic. Squares: prompts of 1,000 tokens.",
        _note(data),
        3.9,
    )
    axis = figure.add_axes((x + 0.075, y + 0.075, width - 0.075, height - 0.08))
    done = [p.gflops for p in data.points]
    ceiling = data.products[1] if data.products else max(done) * 1.6
    axis.set(xscale="log", yscale="log", ylim=(min(done) / 1.8, 2 * ceiling))
    axis.set_xlim(0.62, 4.5 * max(p.intensity for p in data.points))
    axis.set_xlabel("FLOPs per byte of weights ≈ tokens per step")
    axis.set_ylabel("GFLOP per second")
    for number, ticks in ((axis.set_xticks, (1, 4, 16, 64, 256, 1000)), (axis.set_yticks, (10, 100, 1000))):
        number(ticks, [f"{t:,}" for t in ticks])
    axis.minorticks_off()
    _roof(axis, data)
    ours = sorted((p for p in data.points if p.system == "nanospec"), key=lambda p: p.tokens)
    axis.plot([p.intensity for p in ours], [p.gflops for p in ours], color=style.BLUE, lw=1, alpha=0.5)
    for p in data.points:
        _point(axis, p, labelled=p.prompt or p.system != "nanospec" or p.tokens in (1, 4, 16, 64, 128))
    return figure


def _note(data: Data) -> str:
    alone = "our steps alone, the fastest of some, without a text before them; " * ("automatic" in data.files)
    return (
        f"{style.source(data.files, data.machine)} SmolLM2-135M in bf16, one request; {alone}others' as they "
        "write; prompts until their first token. FLOPs are counted from the model's shape. The roof is a "
        "median, in a band of quartiles."
    )


def _roof(axis: Any, data: Data) -> None:
    left, right = axis.get_xlim()
    bottom, top = axis.get_ylim()
    low, rate, high = data.memory
    ridge = data.products[1] / rate if data.products else top / rate / 1.15
    band = {"color": style.GREY, "alpha": 0.3, "lw": 0}
    axis.fill_between([left, ridge], [low * left, low * ridge], [high * left, high * ridge], **band)
    axis.plot([left, ridge], [rate * left, rate * ridge], color=style.INK, lw=1.6)
    box = axis.get_window_extent()
    angle = math.degrees(math.atan2(box.height / math.log(top / bottom), box.width / math.log(right / left)))
    at = math.exp((math.log(left) + math.log(ridge)) / 2)
    axis.annotate(
        f"as fast as memory delivers weights: {rate:.0f} GB/s", (at, rate * at), (-5, 6), ha="center",
        textcoords="offset points", rotation=angle, rotation_mode="anchor", fontsize=9,
    )  # fmt: skip
    if data.products:
        a, b, c = data.products
        axis.fill_between([ridge, right], [a, a], [c, c], **band)
        axis.plot([ridge, right], [b, b], color=style.INK, lw=1.6)
        axis.annotate(
            f"as fast as products compute: {b / 1e3:.1f} TFLOP/s", (right, b), (-4, 6), ha="right",
            textcoords="offset points", fontsize=9,
        )  # fmt: skip


def _point(axis: Any, p: Point, labelled: bool) -> None:
    ours = p.system == "nanospec"
    color = style.BLUE if ours else style.ORANGE if p.system == "vllm" else style.GREY
    axis.plot(p.intensity, p.gflops, "s" if p.prompt else "o", color=color, ms=7, mec=style.PAPER, zorder=4)
    if not labelled:
        return
    ms = f"{p.ms:.0f} ms" if p.ms >= 20 else f"{p.ms:.1f} ms"
    what = "prompt" if p.prompt else f"{p.tokens} token{'s' * (p.tokens > 1)}"
    name = NAMES.get(p.system, p.system) if p.tokens == 1 or not ours else ""
    look = {"fontsize": 9, "color": color, "textcoords": "offset points", "zorder": 5}
    if p.prompt:
        look |= {"xytext": (9, -4 if ours else -9)}
    else:
        look |= {"xytext": (8, -9 if ours else -3)}
    said = [name, "" if p.prompt and not ours else what, ms]
    axis.annotate(", ".join(filter(None, said)), (p.intensity, p.gflops), **look)
