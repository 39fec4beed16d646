"""The roofline of some models: what drafts cost and bring, computed (`nanospec/apps/cli/account.py`).

    python bench/roofline.py [--model qwen3-8b] [--config PATH] [--context 1024] [--gpus 1] [--out .]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec.apps.cli.account import Machine, account
from nanospec.apps.cli.roofline import ACCEPTANCES, break_even, expected_tokens, explain
from nanospec.apps.cli.shapes import SHAPES as MODELS
from nanospec.models.config import ModelConfig, read_json

BATCHES = (1, 8, 64, 256)
DRAFTS = (0, 2, 4, 8)


def load_model(path: Path) -> ModelConfig:
    """The shape in a config.json, or in a folder that holds one."""
    return ModelConfig.from_path(path) if path.is_dir() else ModelConfig.from_dict(read_json(path))


# ---- what is shown -----------------------------------------------------------------------------


def table(
    config: ModelConfig,
    machine: Machine,
    context: int,
    batches: Iterable[int],
    drafts: Sequence[int],
    gpus: int = 1,
) -> list[dict[str, Any]]:
    """Every figure of every (B, K), one dict each; bytes and FLOPs are those of one of the GPUs."""
    rows = []
    for B in batches:
        for K in drafts:
            step = account(config, B, K, context, gpus=gpus)
            ratio = break_even(config, B, K, context, machine, gpus)
            rows.append(
                {
                    "B": B,
                    "K": K,
                    "bytes": step.bytes,
                    "flops": step.flops,
                    "intensity": round(step.intensity, 2),
                    "launches": step.launches,
                    **({"exchanges": step.exchanges, "received": step.received} if gpus > 1 else {}),
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
    parser.add_argument("--gpus", type=int, default=1, help="that share a model (tensor parallelism)")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)

    machine = Machine(args.bandwidth, args.flops, args.launch_us * 1e-6)
    models = {name: MODELS[name] for name in args.model or ([] if args.config else MODELS)}
    if args.config:
        models[str(args.config)] = load_model(args.config)
    tables = {}
    for name, config in models.items():
        if args.gpus == 1:
            print(f"\n{name}: one request, context {args.context}\n{explain(config, machine, args.context)}")
        tables[name] = table(config, machine, args.context, args.batch, args.drafts, args.gpus)
        show(name, tables[name], args.drafts)
    settings = {"bandwidth": machine.bandwidth, "flops": machine.flops, "launch_s": machine.launch}
    if args.gpus > 1:
        settings |= {"gpus": args.gpus, "link": machine.link, "exchange_s": machine.exchange}
    result = {"environment": common.environment(), "machine": settings, "context": args.context}
    common.save("roofline", {**result, "models": tables}, args.out)


if __name__ == "__main__":
    main()
