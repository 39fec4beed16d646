"""Batch, GPUs per replica, K and price of a token on GPUs, computed: the tables of `docs/scaling.md`.

    python bench/fleet.py [--out bench/results]

What K drafts bring is measured: lookup is replayed on real texts (`bench/traces.py`). What a step takes is
computed (`bench/roofline.py`). A replica that always has B rows computes B prompts while each row writes its
output, so a token of a row takes on average

    step / tokens per step + B x prompt / output

Waiting, failures, the host's time and padding to captured batch sizes are not considered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common, traces
from bench.roofline import MODELS, Machine, account, kv_tokens, prefill
from nanospec.config import SpecConfig
from nanospec.device.graphs import MAX_STEP_TOKENS
from nanospec.models import resolve_model
from nanospec.text.tokenizer import Tokenizer

KINDS = {"prose": "news", "code edits": "code edits"}
SHOWN = ("qwen3-8b", "llama-3.3-70b")
KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
ROWS = (*range(1, 33), *range(36, 129, 4), *range(136, 513, 8))
BOUNDS = (5, 10, 20, 50)  # ms per token
PROMPT, OUTPUT, CHUNK = 1024, 256, 2048  # tokens
PRICE = 3.5  # dollars per GPU and hour
Brought = Mapping[int, float]  # tokens per step by K
NONE: Brought = {0: 1.0}


def brought(texts: Sequence[traces.Trace]) -> dict[int, float]:
    """Tokens per step of one request of these texts, for every K."""
    found = {}
    for k in KS:
        tokens = steps = 0
        for trace in texts:
            at = 0
            while at < len(trace):
                at += 1 + min(trace.drafts(at, k), trace.run[at])
                steps += 1
            tokens += len(trace)
        found[k] = round(tokens / steps, 4)
    return found


@dataclass(frozen=True)
class Replica:
    """Always `rows` requests with `k` drafts each: ms per token of a row, and dollars per million output
    tokens, their prompts included."""

    gpus: int
    rows: int
    k: int
    ms: float
    dollars: float


def best(model: str, texts: Brought, bound: float, machine: Machine) -> dict[str, float] | None:
    """Return the cheapest replica that needs at most `bound` ms per token, None if there is none."""
    config, found = MODELS[model], []
    for gpus in (1, 2, 4, 8):
        room = kv_tokens(config, machine, gpus)
        prompt = prefill(config, PROMPT, 0, gpus).estimate(machine)
        for rows in (n for n in ROWS if n * (PROMPT + OUTPUT) <= room):
            for k in (k for k in texts if k == 0 or rows * (k + 1) <= MAX_STEP_TOKENS):
                step = account(config, rows, k, PROMPT + OUTPUT // 2, gpus).estimate(machine)
                ms = step / texts[k] + rows * prompt / OUTPUT
                found.append(Replica(gpus, rows, k, ms, PRICE / 3600 * gpus * ms / rows * 1e3))
    chosen = min((r for r in found if r.ms <= bound), key=lambda r: r.dollars, default=None)
    if chosen is None:
        return None
    return asdict(replace(chosen, ms=float(f"{chosen.ms:.3g}"), dollars=float(f"{chosen.dollars:.3g}")))


def replicas(kinds: Mapping[str, Brought], machine: Machine) -> dict[str, Any]:
    """Return the cheapest replica by model, bound and text."""
    return {
        model: {
            bound: {name: best(model, texts, bound, machine) for name, texts in kinds.items()}
            for bound in BOUNDS
        }
        for model in SHOWN
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--texts", type=int, default=40, help="per kind")
    args = parser.parse_args(argv)
    texts = traces.workloads(Tokenizer(resolve_model(args.tokenizer)), args.texts)
    lengths = SpecConfig.prompt_lookup_min, SpecConfig.prompt_lookup_max
    kinds: dict[str, Brought] = {
        name: brought([traces.replay(text, *lengths) for text in texts[group]])
        for name, group in KINDS.items()
    }
    machine = Machine()
    common.save(
        "fleet",
        {
            "environment": common.environment(),
            "machine": asdict(machine),
            "tokens_per_step": kinds,
            "replicas": replicas({"none": NONE, **kinds}, machine),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
