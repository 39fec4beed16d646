"""Which match should lookup take: the longest, the latest, the earliest, of how many tokens?

    python bench/matches.py [--texts 16] [--out bench/results]

The texts of `traces.py` through the simulator of `simulate.py`, for every shortest and longest length.
Of several longest matches the latest is taken (the engine's choice) or the earliest. Printed are the
tokens per step of one request with 8 drafts, and the speed-up of the automatic policies over K = 0 on a
CPU and an H200. What it showed: longer is better and the longest must win (one fixed length loses up to
a fifth); a shortest length of 1 is best where a policy weeds out what does not pay; latest and earliest
differ by less than two percent, either way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from bench import common, roofline, traces
from bench.simulate import cpu_costs, packed_costs, recorded_costs
from bench.strategies import Fixed, automatic, simulate
from bench.traces import Text
from nanospec.models.hub import resolve_model
from nanospec.text.tokenizer import Tokenizer

MATCHES: tuple[tuple[str, int, int], ...] = (
    *(("latest", low, high) for high in (3, 4, 5, 6, 8) for low in (1, 2, 3, 4) if low <= high),
    *(("earliest", low, high) for low, high in ((1, 3), (2, 5), (1, 8), (2, 8))),
    *(("one length", n, n) for n in (1, 2, 3, 4, 5, 8)),
)


def matches(texts: Mapping[str, list[Text]], machine: roofline.Machine) -> list[dict[str, Any]]:
    """By choice of match: what lookup brings with 8 drafts, and the automatic speed-up with up to 16."""
    cpu, gpu = cpu_costs(), packed_costs("qwen3-8b", 64, machine)
    recorded = recorded_costs("qwen3-0.6b", (64,), machine)
    systems = {  # rows, costs, ms per token without drafts
        "cpu_B1": (1, cpu, cpu.cost(1, 1)),
        "cpu_B4": (4, cpu, cpu.cost(4, 4) / 4),
        "packed_8b_B64": (64, gpu, gpu.cost(64, 64) / 64),
        "bucket_0.6b_B64": (64, recorded, recorded.cost(64, 64) / 64),
    }
    rows = []
    for pick, low, high in MATCHES:
        matcher = traces.replay_earliest if pick == "earliest" else traces.replay
        row: dict[str, Any] = {"pick": pick, "min": low, "max": high, "workloads": {}}
        for name, group in texts.items():
            source = [matcher(text, low, high) for text in group]
            fixed = simulate(source, 1, Fixed(8, cpu), 6000)
            row["workloads"][name] = {
                "tokens_per_step": round(fixed.tokens / fixed.steps, 3),
                "acceptance": round(fixed.accepted / max(fixed.drafted, 1), 3),
                "speedup": {
                    key: round(simulate(source, B, automatic(costs), max(6000, 200 * B)).rate * plain, 3)
                    for key, (B, costs, plain) in systems.items()
                },
            }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Tokens per step by workload, and the geometric mean of the speed-ups over workloads."""
    names, systems = list(rows[0]["workloads"]), list(rows[0]["workloads"]["news"]["speedup"])
    print("tokens per step with 8 drafts; automatic speed-up, geometric mean over the workloads")
    print(" " * 16 + "".join(f"{name[:10]:>11}" for name in names) + "".join(f"{s:>17}" for s in systems))
    for row in rows:
        cells = list(row["workloads"].values())
        means = [statistics.geometric_mean(cell["speedup"][system] for cell in cells) for system in systems]
        print(
            f"{row['pick']:10} {row['min']}..{row['max']} "
            + "".join(f"{cell['tokens_per_step']:11.3f}" for cell in cells)
            + "".join(f"{mean:17.3f}" for mean in means)
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--texts", type=int, default=16, help="per workload")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)
    texts = traces.workloads(Tokenizer(resolve_model(args.tokenizer)), args.texts)
    rows = matches(texts, roofline.Machine())
    show(rows)
    common.save("matches", {"environment": common.environment(), "matches": rows}, args.out)


if __name__ == "__main__":
    main()
