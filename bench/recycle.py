"""How much do recycled tokens guess, alone and on the chains of lookup? Decoding, simulated on real outputs.

    python bench/recycle.py [--texts FILE] [--prompts 10] [--max-tokens 128] [--out bench/results]

SmolLM2-135M answers, greedily and at temperature 1; `replay.py` says how, and makes the steps. Answers are
kept in FILE, which is made if it is not there (12 minutes; the rest takes 8). Requests run one at a time, one
of each kind in turn. The first step has the prompt's last token, and drafts behind it, as in the engine.

Counts, not times: nothing else on the machine matters. A speed is in units of steps without drafts, from
measured times of steps; for the H200 from estimated ones, of another model than the one that wrote. "packed"
cuts each tree, "recorded" has one K for the next step (`simulate.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common, simulate
from bench.replay import Replay, Text, Total, Way, load
from bench.roofline import Machine
from nanospec.drafters.costs import StepCosts
from nanospec.drafters.policy import AutoPolicy, Policy
from nanospec.kernels.speculation import grow
from nanospec.kernels.speculation.recycled import PAIR, TOKEN

NODES, MOST = (4, 8, 16, 32), 16  # nodes of a tree; of one that is cut
SHORT = 32  # tokens; a request with fewer says little
STARTS = ("cold", "prompt", "warm", "warm+prompt")
# A step by the tokens that it scores, 2 cores of AMD: relative, with avx512_bf16; ms, with AVX2 alone.
AVX512 = {1: 1.0, 5: 1.03, 9: 1.16, 17: 1.35}
AVX2 = {1: 11.09, 2: 11.78, 4: 14.63, 8: 21.45, 12: 31.57, 13: 32.66, 16: 38.3, 17: 44.34}
COSTS = {
    "AVX-512": StepCosts(packed=AVX512),
    "AVX2": StepCosts(packed=AVX2),
    "H200, Qwen3-8B, packed": simulate.packed_costs("qwen3-8b", 1, Machine()),
    "H200, Qwen3-8B, recorded": simulate.recorded_costs("qwen3-8b", (1,), Machine()),
}


def run(texts: Sequence[Text], way: Way, k: int, costs: StepCosts | None = None) -> dict[str, Any]:
    """By kind of text: tokens per step, and with costs the speed; the least of a request that is not short,
    and how many lose more than 2 %."""
    longest = max(text.max_len for text in texts)
    replay = Replay(way, k, longest, AutoPolicy(costs) if costs else Policy())
    totals: dict[str, list[Total]] = {}
    for text in interleaved(texts):
        totals.setdefault(text.kind, []).append(replay.request(text))
    found: dict[str, Any] = {
        "tokens_per_step": averaged({kind: ratio(group, "tokens", "steps") for kind, group in totals.items()})
    }
    if costs:
        speeds = {kind: ratio(group, "plain_ms", "ms") for kind, group in totals.items()}
        each = [t.plain_ms / t.ms for group in totals.values() for t in group if t.tokens >= SHORT]
        found |= {"speed": averaged(speeds), "requests": len(each), "behind": sum(x < 0.98 for x in each)}
        found["slowest_request"] = round(min(each), 3) if each else None
    return found


def interleaved(texts: Sequence[Text]) -> list[Text]:
    """The first of each kind, the second of each, and so on."""
    kinds = dict.fromkeys(text.kind for text in texts)
    groups = [[text for text in texts if text.kind == kind] for kind in kinds]
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def ratio(totals: Sequence[Total], above: str, below: str) -> float:
    return sum(getattr(t, above) for t in totals) / sum(getattr(t, below) for t in totals)


def averaged(values: dict[str, float]) -> dict[str, float]:
    return {kind: round(value, 3) for kind, value in {**values, "mean": mean(values.values())}.items()}


# ---- tables ------------------------------------------------------------------------------------


def accepted(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Tokens per step of trees of n nodes."""
    ways = [Way(recycled=False)]
    for start in STARTS:
        ways += [Way(lookup, True, start, pairs) for lookup in (False, True) for pairs in (False, True)]
    if texts[0].temperature:
        ways += [Way(lookup, noise=False) for lookup in (False, True)]
    return [shown({"nodes": n, **named(way)}, run(texts, way, n)) for way in ways for n in NODES]


def speeds(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Where the engine's choice cuts trees."""
    ways = [Way(recycled=False), Way(lookup=False), Way(), Way(start="warm+prompt")]
    ways += [Way(noise=False)] * bool(texts[0].temperature)
    return [
        shown({"costs": name, **named(way)}, run(texts, way, MOST, costs))
        for name, costs in COSTS.items()
        for way in ways
    ]


def alternatives(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Other numbers in `grow.py`: in PyTorch, which is slow, so of trees of 8 and half of the texts; and
    lookup alone on these."""
    numbers: dict[str, dict[str, Any]] = {
        "as they are": {},
        "trust 0.2, 0.4": {"TRUST": {TOKEN: 0.2, PAIR: 0.4}},
        "trust 0.3, 0.6": {"TRUST": {TOKEN: 0.3, PAIR: 0.6}},
        "trust 0.8, 0.95": {"TRUST": {TOKEN: 0.8, PAIR: 0.95}},
        "prior 8": {"PRIOR": 8.0},
        "first of a chain (n+1)/(n+2)": {"copied": lambda n, i: (n + 1) / (n + 2)},
    }
    half, rows = [text for text in texts if not text.seed % 2], []
    for machine in ("AVX-512", "AVX2"):
        found = run(half, Way(recycled=False), 8, COSTS[machine])
        rows.append(shown({"numbers": "lookup alone", "costs": machine}, found))
        for name, changed in numbers.items():
            with mock.patch.multiple(grow, **changed) if changed else nullcontext():
                found = run(half, Way(grow=grow.naive), 8, COSTS[machine])
            rows.append(shown({"numbers": name, "costs": machine}, found))
    return rows


def named(way: Way) -> dict[str, Any]:
    """What is told of a way."""
    if not way.recycled:
        return {"way": "lookup"}
    kept = {"start": way.start, "entries": "tokens, pairs" if way.pairs else "tokens"}
    return {"way": "both" if way.lookup else "recycled", **kept, "noise": way.noise}


def shown(setting: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Print a row of a table, and return it."""
    values = found.get("speed", found["tokens_per_step"])
    name = " ".join(map(str, setting.values()))
    losses = f"  slowest {found['slowest_request']}, {found['behind']} behind" if "speed" in found else ""
    print(f"{name:55}" + "".join(f"{x:7.2f}" for x in values.values()) + losses, flush=True)
    return {**setting, **found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, help="where the model's answers are kept")
    parser.add_argument("--prompts", type=int, default=10, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)
    texts = load(args.texts, args.prompts, args.max_tokens)
    result: dict[str, Any] = {"environment": common.environment(), "most_nodes": MOST}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        own = [text for text in texts if text.temperature == temperature]
        print(f"\n{name}: {', '.join(dict.fromkeys(text.kind for text in own))}, mean")
        tables = (accepted, speeds, alternatives)
        result[name] = {table.__name__: table(own) for table in tables}
    common.save("recycle", result, args.out)


if __name__ == "__main__":
    main()
