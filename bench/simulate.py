"""Is the automatic choice of K right? Policies against traces and costs, without a model.

    python bench/simulate.py [--costs steps.json] [--out bench/results]

B requests run at once, taking the next text when one ends. Each step a policy says how many drafts are
verified; the traces (`traces.py`) say how many of them are right; the cost table says how long it took.
Two forms of a step, one policy:

* packed: every row pays for its own drafts, which are known when their number is chosen (the CPU's way)
* recorded: one K for the whole batch, chosen before the drafts are known, every row padded to K + 1
  tokens; results are known one step late (the way of captured graphs)

Reported is the speed-up over K = 0 for every fixed K and the automatic choice; *regret* is what the
automatic choice loses against the best fixed K, known only in hindsight. `last_done` is the speed-up where
no request waits: until the last of B requests that began together has ended. Costs are those of the
roofline with launches (`roofline.py`), of an H200 at a context of 1024, and for the CPU what SmolLM2-135M
was measured to take on two cores in bf16."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from bench import common, roofline, traces
from bench.strategies import Fixed, Strategy, automatic, last_done, simulate
from bench.traces import MAX_DRAFTS, Trace
from nanospec.config import SpecConfig
from nanospec.drafters.estimates import StepCosts
from nanospec.models import resolve_model
from nanospec.text.tokenizer import Tokenizer

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
BATCHES = (1, 4, 16, 64, 128, 256)
STEADY = (10000, 400)  # tokens of a run: at least, and per row
CPU_MS = {1: 9.6, 2: 9.7, 4: 9.9, 8: 10.7, 16: 12.5, 32: 17.0, 64: 27.0}  # by tokens per step


def waves(source: Sequence[Trace], B: int, costs: StepCosts) -> float:
    """Return the automatic choice's speed-up over K = 0 until the last of B requests that begin together has
    ended."""
    return last_done(source, B, Fixed(0, costs)) / last_done(source, B, automatic(costs))


def compare(source: Sequence[Trace], B: int, costs: StepCosts, tokens: int) -> dict[str, Any]:
    """Speed-up over K = 0 of every fixed K, and automatic."""
    ks = costs.by_k(B, MAX_DRAFTS) if costs.captured else KS
    strategies: dict[str, Strategy] = {f"K={k}": Fixed(k, costs) for k in ks if k}
    strategies["auto"] = automatic(costs)
    plain = B / costs.cost(B, B)
    speed = {"K=0": 1.0}
    outcomes = {name: simulate(source, B, strategy, tokens) for name, strategy in strategies.items()}
    speed |= {name: outcome.rate / plain for name, outcome in outcomes.items()}
    fixed = {name: s for name, s in speed.items() if name != "auto"}
    best = max(fixed, key=fixed.__getitem__)
    auto = outcomes["auto"]
    last = {"last_done": round(waves(source, B, costs), 3)} if 1 in costs.packed else {}
    return {
        "speedup": {name: round(s, 3) for name, s in speed.items()},
        **last,
        "best_fixed": best,
        "auto_to_best_fixed": round(speed["auto"] / speed[best], 3),
        "tokens_per_step": round(auto.tokens / auto.steps / B, 3),
        "acceptance": round(auto.accepted / max(auto.drafted, 1), 3),
    }


# ---- costs -------------------------------------------------------------------------------------


def packed_costs(model: str, B: int, machine: roofline.Machine) -> StepCosts:
    """Of steps of B rows by the tokens they score, from the roofline."""
    config = roofline.MODELS[model]
    sizes = sorted({B + round(B * MAX_DRAFTS * i / 32) for i in range(33)})
    return StepCosts(packed={n: _ms(config, B, n / B - 1, machine) for n in sizes})


def cpu_costs() -> StepCosts:
    """Of SmolLM2-135M on two cores."""
    return StepCosts(packed=CPU_MS)


def recorded_costs(model: str, batches: Sequence[int], machine: roofline.Machine) -> StepCosts:
    """Of every (B, K), from the roofline."""
    config = roofline.MODELS[model]
    return StepCosts({B: {K: _ms(config, B, K, machine) for K in KS} for B in batches})


def _ms(config: Any, B: int, K: float, machine: roofline.Machine) -> float:
    low, part = int(K), K - int(K)
    below = roofline.account(config, B, low).estimate(machine)
    return below + part * (roofline.account(config, B, low + 1).estimate(machine) - below) if part else below


def load_costs(path: Path) -> StepCosts:
    """A measured table: {"cost": {"B": {"K": ms}}}."""
    table = json.loads(path.read_text())["cost"]
    return StepCosts({int(B): {int(k): float(ms) for k, ms in row.items()} for B, row in table.items()})


# ---- what is shown -----------------------------------------------------------------------------


def mixed(groups: Mapping[str, list[Trace]]) -> list[Trace]:
    """Code edits and Shakespeare in turn: some rows of a batch gain, others never do."""
    return [trace for pair in zip(groups["code edits"], groups["Shakespeare"]) for trace in pair]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--min", type=int, default=SpecConfig.prompt_lookup_min, help="prompt_lookup_min")
    parser.add_argument("--max", type=int, default=SpecConfig.prompt_lookup_max, help="prompt_lookup_max")
    parser.add_argument("--texts", type=int, default=40, help="per workload")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--answers", help="a model whose own answers are workloads, too")
    parser.add_argument("--costs", type=Path, help='measured: {"cost": {"B": {"K": ms}}}')
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)

    texts = traces.workloads(Tokenizer(resolve_model(args.tokenizer)), args.texts)
    texts |= traces.answers(args.answers, args.texts) if args.answers else {}
    machine = roofline.Machine()
    groups = {name: [traces.replay(t, args.min, args.max) for t in group] for name, group in texts.items()}
    groups["mixed"] = mixed(groups)
    groups["never right"] = [Trace([3] * 400, [0] * 400)] * 16
    systems: dict[str, dict[int, StepCosts]] = {
        "packed, CPU, smollm2-135m": {B: cpu_costs() for B in args.batch if B <= 16},
    }
    for model in ("qwen3-0.6b", "qwen3-8b"):
        recorded = recorded_costs(model, args.batch, machine)
        systems[f"recorded, H200, {model}"] = dict.fromkeys(args.batch, recorded)
        systems[f"packed, H200, {model}"] = {B: packed_costs(model, B, machine) for B in args.batch}
    if args.costs:
        measured = load_costs(args.costs)
        sizes = [B for B in args.batch if B <= max(measured.captured)]  # noqa: SIM300
        systems = {f"recorded, {args.costs.stem}": dict.fromkeys(sizes, measured)}
    result = {
        system: {
            name: {B: compare(group, B, cost, max(STEADY[0], STEADY[1] * B)) for B, cost in costs.items()}
            for name, group in groups.items()
        }
        for system, costs in systems.items()
    }
    for system, by_name in result.items():
        show(system, by_name)
    settings = {"environment": common.environment(), "min": args.min, "max": args.max}
    common.save("simulate", {**settings, "systems": result}, args.out)


def show(system: str, by_name: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Print automatic and best fixed K, and the regret."""
    print(f"\n{system}: speed-up over K=0: automatic (best fixed K), automatic / best fixed")
    for name, by_batch in by_name.items():
        cells = [
            f"{B}: {r['speedup']['auto']:.2f} ({r['speedup'][r['best_fixed']]:.2f} {r['best_fixed']}) "
            f"{r['auto_to_best_fixed']:.1%}"
            for B, r in by_batch.items()
        ]
        print(f"  {name:15} " + "   ".join(cells))
    runs = [r for by_batch in by_name.values() for r in by_batch.values()]
    if last := [r["last_done"] for r in runs if "last_done" in r]:
        print(f"  until the last of a wave is done at least {min(last):.1%} of K=0 (limit 98 %)")
    print(
        f"  at least {min(r['auto_to_best_fixed'] for r in runs):.1%} of the best fixed K (limit 95 %), "
        f"{min(r['speedup']['auto'] for r in runs):.1%} of K=0 (limit 98 %)"
    )


if __name__ == "__main__":
    main()
