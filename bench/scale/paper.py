"""What follows from the account of a step alone: batches, GPUs per replica, drafts, draft models, moving K/V.

A replica that always has B rows computes B prompts while each row writes its output, so a token takes

    step / tokens per step + B x prompt / output          (`steady`)

which is exact on average and says nothing of waiting; `questions.py` checks it against the simulated fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.scale.costs import Costs
from bench.scale.guessing import Brought, captured
from nanospec.apps.cli.account import Machine, account
from nanospec.apps.cli.shapes import SHAPES
from nanospec.device.graphs import batch_sizes
from nanospec.kernels.layer.vocab_parallel import in_slices
from nanospec.models.config import ModelConfig

Json = dict[str, Any]
MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.3-70b")
SPLITS = (1, 2, 4, 8)
ROWS = (*range(1, 33), *range(36, 129, 4), *range(136, 513, 8))  # that a replica may have
BOUNDS = (5, 10, 20, 50)  # ms per token
PRICE = 3.5  # dollars per GPU and hour
WORTH = 1.02  # a gain that is called one
NONE: Brought = {0: 1.0}


@dataclass(frozen=True)
class Point:
    """A replica that always has so many rows: ms per token of a row, output tokens per second and GPU."""

    gpus: int
    rows: int
    k: int
    ms: float
    rate: float

    @property
    def dollars(self) -> float:
        """Per million output tokens, with their prompts."""
        return dollars(self.rate)

    def report(self) -> Json:
        return {name: _short(value) for name, value in {**asdict(self), "dollars": self.dollars}.items()}


def dollars(rate: float, price: float = PRICE) -> float:
    """Per million tokens at so many a second and GPU."""
    return price / 3600 / rate * 1e6


def _short(value: float) -> float:
    """Three digits are all that paper is good for."""
    return value if isinstance(value, int) else float(f"{value:.3g}")


def steady(
    costs: Costs, kind: Brought, rows: int, k: int, prompt: int, output: int, cached: int = 0
) -> Point:
    """Always `rows` of this kind of text, k drafts each; see the module docstring."""
    step = costs.step(rows, k, rows * (prompt + output / 2)) / kind[k]
    ms = step + rows * costs.prompt(prompt - cached, cached) / output
    return Point(costs.gpus, rows, k, ms, 1e3 * rows / ms / costs.gpus)


def best(
    splits: Iterable[Costs],
    kind: Brought,
    bound: float,
    cached: int = 0,
    prompt: int = 1024,
    output: int = 256,
) -> Point | None:
    """The most tokens per second and GPU with at most `bound` ms per token; None if that cannot be."""
    points = (
        steady(costs, kind, rows, k, prompt, output, cached)
        for costs in splits
        for rows in ROWS
        if rows * (prompt + output) <= costs.kv_tokens
        for k in captured(rows)
        if k in kind
    )
    return max((p for p in points if p.ms <= bound), key=lambda p: p.rate, default=None)


def replicas(
    kinds: Mapping[str, Brought],
    machine: Machine | None = None,
    slices: bool | None = None,
    cached: int = 0,
) -> Json:
    """The best batch, TP and K by model, bound on the time of a token, and text. `slices`: how sums are added
    (see `Costs`); `cached`: tokens of each prompt of 1,024."""
    found: Json = {}
    for model in MODELS:
        splits = [Costs(SHAPES[model], machine, gpus, slices) for gpus in SPLITS]
        found[model] = {
            str(bound): {
                name: point.report() if (point := best(splits, kind, bound, cached)) else None
                for name, kind in {"none": NONE, **kinds}.items()
            }
            for bound in BOUNDS
        }
    return found


def drafts(kinds: Mapping[str, Brought], context: int = 1152) -> Json:
    """Steps alone: the best K by model, text and rows, its gain, and up to how many rows that is worth it."""
    found: Json = {}
    for model, gpus in zip(MODELS, (1, 1, 4)):
        costs = Costs(SHAPES[model], gpus=gpus)
        rows = [n for n in batch_sizes(512) if n * context <= costs.kv_tokens]
        found[model] = {"gpus": gpus}
        for name, kind in kinds.items():
            by_rows = {n: _gain(costs, kind, n, context) for n in rows}
            last = max((n for n, (_, gain) in by_rows.items() if gain >= WORTH), default=0)
            shown = {str(n): {"k": k, "gain": round(gain, 3)} for n, (k, gain) in by_rows.items()}
            found[model][name] = {"worth_until": last, "rows": shown}
    return found


def _gain(costs: Costs, kind: Brought, rows: int, context: int) -> tuple[int, float]:
    """The best K, and the speed over none."""
    ms = {k: costs.step(rows, k, rows * context) for k in captured(rows)}
    k = max(ms, key=lambda k: kind[k] / ms[k])
    return k, kind[k] / ms[k] * ms[0]


def sums() -> Json:
    """ms of steps and of a prompt of 2,048 by split, with sums gathered and with sums in slices, and from how
    many tokens on the engine takes slices."""
    found: Json = {}
    for model in MODELS:
        found[model] = {}
        for gpus in SPLITS[1:]:
            both = [Costs(SHAPES[model], gpus=gpus, slices=slices) for slices in (False, True)]
            if both[0].kv_tokens:
                cases = {f"B={n}": [costs.step(n, 0, n * 1152) for costs in both] for n in (1, 16, 64, 256)}
                cases["prompt"] = [costs.prompt(2048) for costs in both]
                shown = {case: [round(ms, 3) for ms in pair] for case, pair in cases.items()}
                more = {"kv_tokens": both[0].kv_tokens, "slices_from": slices_from(both[0])}
                found[model][str(gpus)] = {**shown, **more}
    return found


def slices_from(costs: Costs) -> int | None:
    """Tokens of a pass from which on the engine adds in slices; None: of no pass that there is."""
    row = 2 * costs.config.hidden_size
    return next((n for n in range(1, 4097) if in_slices(n * row, costs.gpus)), None)


# ---- a draft model beside a split target --------------------------------------------------------

LAYERS = (8, 16, 28, 36)
WIDTHS = range(512, 8193, 256)


def draft_models(exchanges: Sequence[float] = (6e-6, 10e-6, 20e-6)) -> Json:
    """A pass of a draft model, whole on every GPU or split like the target: ms for known shapes, and the size
    from which on splitting it is the faster, by GPUs, layers, rows and the time of an exchange."""
    shapes = {name: SHAPES[name] for name in ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")}
    passes = {
        name: {
            str(rows): {
                str(n): {how: round(ms, 3) for how, ms in _passes(config, rows, n, Machine()).items()}
                for n in SPLITS[1:]
            }
            for rows in (1, 64)
        }
        for name, config in shapes.items()
    }
    crossovers = [
        {"gpus": n, "layers": layers, "rows": rows, "exchange_us": round(1e6 * exchange), "parameters": size}
        for n in SPLITS[1:]
        for layers in LAYERS
        for rows in (1, 64)
        for exchange in exchanges
        for size in [_crossover(n, layers, rows, replace(Machine(), exchange=exchange))]
    ]
    return {"passes": passes, "crossovers": crossovers}


def _passes(
    config: ModelConfig, rows: int, gpus: int, machine: Machine, context: int = 1024
) -> dict[str, float]:
    """ms of a pass: whole on every GPU, which all draft for all rows, or each for its share of them, with an
    exchange of what they drafted; or split."""

    def ms(rows: int, gpus: int) -> float:
        return account(config, rows, 0, context, gpus=gpus, whole=True).estimate(machine)

    dealt = ms(-(-rows // gpus), 1) + 1e3 * machine.exchange
    return {"whole": ms(rows, 1), "rows dealt": dealt, "split": ms(rows, gpus)}


def _crossover(gpus: int, layers: int, rows: int, machine: Machine) -> float | None:
    """Parameters from which on a model of so many layers is faster split, and all larger ones with it; in
    proportion between the widths that were computed."""
    size = gain = 0.0
    for width in reversed(WIDTHS):
        config = draft_shape(width, layers)
        ms = _passes(config, rows, gpus, machine)
        smaller, larger, above = config.num_parameters, size, gain
        gain = min(ms["whole"], ms["rows dealt"]) - ms["split"]
        if gain <= 0:
            return float(f"{larger - above / (above - gain) * (larger - smaller):.3g}") if larger else None
        size = smaller
    return float(f"{size:.3g}")


def draft_shape(width: int, layers: int) -> ModelConfig:
    """In Qwen3's proportions: an MLP three times as wide, 8 heads of keys, tied embeddings."""
    return replace(
        SHAPES["qwen3-0.6b"],
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=layers,
        num_heads=-(-width // 512) * 8,  # a multiple of 8, so that 8 GPUs can share them
        windows=(None,) * layers,
    )


# ---- moving K/V --------------------------------------------------------------------------------


def moving(prompt: int = 2048, bandwidth: float = 50e9) -> Json:
    """Of replicas that compute prompts only: tokens and bytes of K/V per second and GPU, and what it takes to
    send a prompt's, all GPUs of a replica at once."""
    found: Json = {}
    for model, gpus in zip(MODELS, (1, 1, 4)):
        costs = Costs(SHAPES[model], gpus=gpus)
        ms = costs.prompt(prompt)
        size = prompt * costs.kv_bytes
        found[model] = {
            "gpus": gpus,
            "kv_bytes_per_token": costs.kv_bytes,
            "prompt_ms": round(ms, 2),
            "gb_per_s_and_gpu": round(size / ms / 1e6 / gpus, 2),
            "send_ms": round(1e3 * size / bandwidth / gpus, 2),
        }
    return found
