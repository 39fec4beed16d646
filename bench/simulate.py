"""Evaluate automatic K by simulation: policies run on recorded traces and step costs, without a model.

    python bench/simulate.py [--answers smollm2-135m-instruct] [--out bench/results]

B requests run at once; a finished request is replaced by the next of `--texts` texts. In each step, the
policy chooses the number of drafts to verify, the trace (`traces.py`) gives the number accepted, and the cost
table gives the time by number of tokens. For captured steps (CUDA graphs), K is chosen before drafts are
proposed, and results are known one step later.

The results are speedups over K = 0 for every fixed K and for automatic K. *Regret* is the loss of automatic K
against the best fixed K, which is known only in hindsight. `last_done` is the speedup without waiting
requests: B requests start together, and the time is measured until the last has finished. Costs are those
of the roofline with launches (`roofline.py`) for an H200 at a context of 1024, and for the CPU the measured
times of SmolLM2-135M on two cores in bf16."""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common, roofline, traces
from bench.strategies import Fixed, Strategy, automatic, last_done, simulate
from bench.traces import MAX_DRAFTS, Trace
from nanospec.config import SpecConfig
from nanospec.drafters.estimates import StepCosts
from nanospec.models.folders import resolve_model
from nanospec.text.tokenizer import Tokenizer

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
BATCHES = (1, 4, 16, 64, 128, 256)
STEADY = (10000, 400)  # tokens of a run: minimum, and per row
CPU_MS = {1: 9.6, 2: 9.7, 4: 9.9, 8: 10.7, 16: 12.5, 32: 17.0, 64: 27.0}  # measured ms by tokens in the step


def compare(source: Sequence[Trace], B: int, costs: StepCosts, tokens: int) -> dict[str, Any]:
    """Return the speedups over K = 0 of every fixed K and of automatic K."""
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
    last = {}
    if not costs.captured:
        times = [last_done(source, B, each) for each in (Fixed(0, costs), automatic(costs))]
        last = {"last_done": round(times[0] / times[1], 3)}
    return {
        "speedup": {name: round(s, 3) for name, s in speed.items()}, **last, "best_fixed": best,
        "auto_to_best_fixed": round(speed["auto"] / speed[best], 3),
        "tokens_per_step": round(auto.tokens / auto.steps / B, 3),
        "acceptance": round(auto.accepted / max(auto.drafted, 1), 3),
    }  # fmt: skip


def captured_costs(model: str, batches: Sequence[int], machine: roofline.Machine) -> StepCosts:
    """Return the roofline costs of every (B, K)."""
    config = roofline.MODELS[model]
    ms = {B: {B * (K + 1): roofline.account(config, B, K).estimate(machine) for K in KS} for B in batches}
    return StepCosts(ms, captured=True)


def main(argv: Sequence[str] | None = None) -> None:
    lookup = {"min": SpecConfig.prompt_lookup_min, "max": SpecConfig.prompt_lookup_max}
    parser = common.parser(__doc__, tokenizer=common.MODEL, texts=40, **lookup)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--answers", help="a model whose greedy outputs are added as workloads")
    args = parser.parse_args(argv)

    texts = traces.workloads(Tokenizer(resolve_model(args.tokenizer)), args.texts)
    texts |= traces.answers(args.answers, args.texts) if args.answers else {}
    machine = roofline.Machine()
    groups = {name: [traces.replay(t, args.min, args.max) for t in group] for name, group in texts.items()}
    # Some rows of a batch benefit from drafts, others never do.
    groups["mixed"] = list(chain(*zip(groups["code edits"], groups["Shakespeare"])))
    groups["never right"] = [Trace([3] * 400, [0] * 400)] * 16
    cpu = StepCosts({16: CPU_MS})
    systems = {"CPU, smollm2-135m": {B: cpu for B in args.batch if B <= 16}}
    for model in ("qwen3-0.6b", "qwen3-8b"):
        systems[f"H200, {model}"] = dict.fromkeys(args.batch, captured_costs(model, args.batch, machine))
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
    """Print the speedups of automatic K and of the best fixed K, and their ratio."""
    print(f"\n{system}: speedup over K=0: automatic (best fixed K), automatic / best fixed")
    for name, by_batch in by_name.items():
        cells = [
            f"{B}: {r['speedup']['auto']:.2f} ({r['speedup'][r['best_fixed']]:.2f} {r['best_fixed']}) "
            f"{r['auto_to_best_fixed']:.1%}"
            for B, r in by_batch.items()
        ]
        print(f"  {name:15} " + "   ".join(cells))
    runs = [r for by_batch in by_name.values() for r in by_batch.values()]
    if last := [r["last_done"] for r in runs if "last_done" in r]:
        print(f"  until the last of B requests has finished: min {min(last):.1%} of K=0 (limit 98%)")
    print(
        f"  min {min(r['auto_to_best_fixed'] for r in runs):.1%} of the best fixed K (limit 95%), "
        f"{min(r['speedup']['auto'] for r in runs):.1%} of K=0 (limit 98%)"
    )


if __name__ == "__main__":
    main()
