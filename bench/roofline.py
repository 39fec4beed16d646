"""The roofline of some models: tables and a plot of what drafts cost and bring (`nanospec/cli/roofline.py`).

    python bench/roofline.py [--model qwen3-8b] [--config PATH] [--context 1024] [--out bench/results]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec.cli.roofline import ACCEPTANCES, Machine, account, break_even, expected_tokens, explain, speedup
from nanospec.cli.shapes import SHAPES as MODELS
from nanospec.models.config import ModelConfig, read_json

BATCHES = (1, 8, 64, 256)
DRAFTS = (0, 2, 4, 8)


def load_model(path: Path) -> ModelConfig:
    """The shape in a config.json, or in a folder that holds one."""
    return ModelConfig.from_path(path) if path.is_dir() else ModelConfig.from_dict(read_json(path))


# ---- what is shown -----------------------------------------------------------------------------


def table(
    config: ModelConfig, machine: Machine, context: int, batches: Iterable[int], drafts: Sequence[int]
) -> list[dict[str, Any]]:
    """Every figure of every (B, K), one dict each."""
    rows = []
    for B in batches:
        for K in drafts:
            step = account(config, B, K, context)
            ratio = break_even(config, B, K, context, machine)
            rows.append(
                {
                    "B": B,
                    "K": K,
                    "bytes": step.bytes,
                    "flops": step.flops,
                    "intensity": round(step.intensity, 2),
                    "launches": step.launches,
                    "bound_ms": round(step.bound(machine), 4),
                    "estimate_ms": round(step.estimate(machine), 4),
                    "break_even_tokens": round(ratio, 4),
                    "speedup": {str(a): round(expected_tokens(a, K) / ratio, 2) for a in ACCEPTANCES},
                }
            )
    return rows


def show(name: str, rows: list[dict[str, Any]], drafts: Sequence[int]) -> None:
    """A line per batch size: least ms, in brackets break-even tokens, and behind the bar ms with launches."""
    print(f"\n{name}: least ms per step (tokens per step to break even) / with launches")
    print("     B" + "".join(f"{f'K={K}':>24}" for K in drafts))
    for B in dict.fromkeys(row["B"] for row in rows):
        cells = [
            f"{row['bound_ms']:.3f} ({row['break_even_tokens']:.2f}) / {row['estimate_ms']:.3f}"
            for row in rows
            if row["B"] == B
        ]
        print(f"{B:6}" + "".join(f"{cell:>24}" for cell in cells))


def plot(models: dict[str, ModelConfig], machine: Machine, context: int, path: Path) -> None:
    """Left: what drafts cost over the batch size. Right: what they bring over K, at three batch sizes."""
    plt = common.pyplot()
    figure, axes = plt.subplots(len(models), 2, figsize=(10, 3.4 * len(models)), squeeze=False)
    batches = sorted({round(2 ** (i / 4)) for i in range(37)})
    ks = range(17)
    for (name, config), (left, right) in zip(models.items(), axes):
        for K, color in zip((1, 2, 4, 8, 16), plt.cm.viridis([0.0, 0.22, 0.45, 0.7, 0.9])):
            ratio = [break_even(config, B, K, context, machine) for B in batches]
            left.plot(batches, ratio, color=color, label=f"K={K}")
            ridge = machine.ridge / (K + 1)
            left.plot(ridge, break_even(config, max(round(ridge), 1), K, context, machine), "^", color=color)
        left.set(xscale="log", yscale="log", xlabel="batch size", ylabel="t(K) / t(0)")
        left.set_title(f"{name}: cost of K drafts (▲ ridge, {machine.ridge:.0f} tokens)", fontsize=10)
        left.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        left.set_yticks([1, 1.5, 2, 3, 5, 8], ["1", "1.5", "2", "3", "5", "8"])
        left.minorticks_off()
        left.legend(fontsize=8)
        for a, color in zip(ACCEPTANCES, plt.cm.plasma([0.05, 0.3, 0.55, 0.8])):
            for B, style in ((1, "-"), (64, "--"), (256, ":")):
                gains = [speedup(config, B, K, context, machine, a) for K in ks]
                label = f"acceptance {a:.0%}" if B == 1 else None
                right.plot(ks, gains, style, color=color, label=label)
        right.axhline(1, color="grey", lw=0.8)
        right.set(xlabel="drafts per step K", ylabel="speed-up over K = 0", ylim=(0, None))
        right.set_title(f"{name}: B = 1 (solid), 64 (dashed), 256 (dotted)", fontsize=10)
        right.legend(fontsize=8)
    figure.suptitle(
        f"Bound by bytes and FLOPs: {machine.bandwidth / 1e12:.1f} TB/s, {machine.flops / 1e12:.0f} TFLOP/s, "
        f"context {context}",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=75)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all of them")
    parser.add_argument("--config", type=Path, help="a model's config.json, or its folder")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens per request")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS)
    parser.add_argument("--bandwidth", type=float, default=Machine.bandwidth, help="bytes/s")
    parser.add_argument("--flops", type=float, default=Machine.flops, help="FLOP/s")
    parser.add_argument("--launch-us", type=float, default=Machine.launch * 1e6, help="per kernel")
    parser.add_argument("--plot", action="store_true", help="also draw roofline.png (needs matplotlib)")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)

    machine = Machine(args.bandwidth, args.flops, args.launch_us * 1e-6)
    models = {name: MODELS[name] for name in args.model or ([] if args.config else MODELS)}
    if args.config:
        models[str(args.config)] = load_model(args.config)
    tables = {}
    for name, config in models.items():
        print(f"\n{name}: one request, context {args.context}\n{explain(config, machine, args.context)}")
        tables[name] = table(config, machine, args.context, args.batch, args.drafts)
        show(name, tables[name], args.drafts)
    if args.plot:
        args.out.mkdir(parents=True, exist_ok=True)
        plot(models, machine, args.context, args.out / "roofline.png")
    settings = {"bandwidth": machine.bandwidth, "flops": machine.flops, "launch_s": machine.launch}
    result = {"environment": common.environment(), "machine": settings, "context": args.context}
    common.save("roofline", {**result, "models": tables}, args.out)


if __name__ == "__main__":
    main()
