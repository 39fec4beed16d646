"""The estimate of every kernel on an H200 (`nanospec/apps/cli/estimate.py`) before and after a change.

    python bench/estimate.py [--label NAME] [--out bench/results]

Adds the figures of this commit, or of the label, to `estimate.json`, in place of those it has of the same,
and prints the first ones beside the last: us per launch, least us in brackets, and ms per step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec.apps.cli.estimate import Gpu, estimate
from nanospec.apps.cli.shapes import SHAPES

CASES = [(model, B, K) for model in ("qwen3-0.6b", "qwen3-8b") for B, K in ((1, 0), (1, 4), (64, 0), (64, 4))]
CONTEXT = 1024

Row = dict[str, Any]


def figures(label: str) -> list[Row]:
    """One row per kernel and case."""
    rows = []
    for model, B, K in CASES:
        for row in estimate(SHAPES[model], B, K, CONTEXT, Gpu()):
            times = {part: round(us, 2) for part, us in row.times.items()}
            sums = {"least_us": round(row.limit, 2), "us": round(row.us, 2)}
            case = {"label": label, "model": model, "B": B, "K": K, "kernel": row.name}
            rows.append({**case, "launches": row.count, "programs": row.programs, **sums, **times})
    return rows


def markdown(rows: list[Row]) -> str:
    """The first label's figures -> the last one's."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    found = {(r["label"], r["model"], r["B"], r["K"], r["kernel"]): r for r in rows}
    heads = [f"{model} B={B} K={K}" for model, B, K in CASES]
    lines = ["| us per launch | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]

    def arrow(values: list[str]) -> str:
        return values[0] if len(labels) == 1 else " → ".join((values[0], values[-1]))

    for kernel in kernels:
        cells = []
        for case in CASES:
            both = [found.get((label, *case, kernel)) for label in labels]
            least = next((r["least_us"] for r in reversed(both) if r), None)
            cell = arrow([f"{r['us']:.1f}" if r else "–" for r in both])
            cells.append(f"{cell} ({least:.1f})" if least is not None else "–")
        lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
    cells = []
    for case in CASES:
        steps = []
        for label in labels:
            of = [r for (*key, _), r in found.items() if key == [label, *case]]
            least, ms = (sum(r[what] * r["launches"] for r in of) / 1e3 for what in ("least_us", "us"))
            steps.append(f"{ms:.2f}")
        cells.append(f"{arrow(steps)} ({least:.2f})")
    lines.append("| step, ms | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", default=common.environment()["commit"], help="default: this commit")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    path = args.out / "estimate.json"
    kept = json.loads(path.read_text()) if path.is_file() else []
    rows = [row for row in kept if row["label"] != args.label] + figures(args.label)
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
