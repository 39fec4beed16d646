"""From one GPU to 10,000, on paper: what `docs/scaling.md` says, into bench/results/fleet.json.

    python bench/fleet.py [--quick] [--jobs 2] [--out bench/results]

Drafts are replayed on real texts (`traces.py`), steps are the roofline's with launches and exchanges
(`nanospec/apps/cli/account.py`), and requests are random by seed: the same command gives the same figures. No
GPU takes part. Takes a quarter of an hour on one core; `--quick` runs small fleets, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common, traces
from bench.scale import paper, questions, runs
from bench.scale.guessing import brought
from nanospec.apps.cli.account import Machine
from nanospec.config import SpecConfig
from nanospec.models.hub import resolve_model
from nanospec.text.tokenizer import Tokenizer

KINDS = {"prose": "news", "code edits": "code edits"}
SIZES = (1, 10, 100, 1000)
FLEETS = (1, 2, 4, 8, 16, 64)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


Replayed = dict[str, list[traces.Trace]]


def replay(tokenizer: str, texts: int) -> Replayed:
    """What lookup finds in the two kinds of text."""
    found = traces.workloads(Tokenizer(resolve_model(tokenizer)), texts)
    low, high = SpecConfig.prompt_lookup_min, SpecConfig.prompt_lookup_max
    return {name: [traces.replay(text, low, high) for text in found[group]] for name, group in KINDS.items()}


def sensitivity(kinds: Mapping[str, paper.Brought]) -> dict[str, Any]:
    """The best replicas if an assumption were another."""
    machine = Machine()
    slower = replace(machine, bandwidth=0.7 * machine.bandwidth, flops=0.7 * machine.flops)
    return {
        "70 % of the rates": paper.replicas(kinds, slower),
        "exchanges of 6 us": paper.replicas(kinds, replace(machine, exchange=6e-6)),
        "exchanges of 20 us": paper.replicas(kinds, replace(machine, exchange=20e-6)),
        "7/8 of a prompt cached": paper.replicas(kinds, cached=896),
        "sums gathered": paper.replicas(kinds, slices=False),
    }


def asked(replayed: Replayed, quick: bool) -> dict[str, Callable[[], Any]]:
    """The questions, which follow from what drafts bring."""
    kinds = {name: brought(group) for name, group in replayed.items()}
    sizes, fleets, shares = (SIZES[:2], FLEETS[:2], SHARES[:1]) if quick else (SIZES, FLEETS, SHARES)
    return {
        "tokens_per_step": partial(dict, kinds),
        "replicas": partial(paper.replicas, kinds),
        "drafts": partial(paper.drafts, kinds),
        "sums": paper.sums,
        "draft_models": paper.draft_models,
        "moving": paper.moving,
        "sensitivity": partial(sensitivity, kinds),
        "saturated": partial(questions.saturated, kinds["prose"]),
        "auto_policy": partial(questions.auto_policy, replayed, kinds),
        "cost": partial(questions.cost, kinds, sizes),
        "routing": partial(questions.routing, kinds, fleets, shares, 2 if quick else 16),
        "disaggregation": partial(questions.disaggregation, kinds, 4 if quick else 16),
        "day": partial(questions.day, kinds, 16.0, 2 if quick else 16),
        "bursts": partial(questions.bursts, kinds, 12.0, 2 if quick else 16),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--texts", type=int, default=40, help="per kind")
    parser.add_argument("--quick", action="store_true", help="small fleets")
    parser.add_argument("--jobs", type=int, default=1, help="questions that are answered at once")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)

    parts = asked(replay(args.tokenizer, args.texts), args.quick)
    settings = {"machine": asdict(Machine()), "price": paper.PRICE, "served_well": runs.WELL}
    result = {"environment": common.environment(), **settings}
    if args.jobs == 1:
        result |= {name: part() for name, part in parts.items()}
    else:
        with ProcessPoolExecutor(args.jobs) as pool:
            answers = {name: pool.submit(part) for name, part in parts.items()}
            result |= {name: answer.result() for name, answer in answers.items()}
    common.save("fleet", result, args.out)


if __name__ == "__main__":
    main()
