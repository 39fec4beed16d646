"""What does automatic K cost where guessing does not pay, and what takes it?

    python bench/automatic.py [--batches 1 4 16 64] [--rounds 3] [--max-tokens 96] [--out bench/results]

One process and one copy of the weights, two engines: K = 0 and automatic K. They take turns after every
step, so that whatever else happens on the machine slows both. Prompts of chat (where lookup is rarely
right) and code edits, greedy, EOS honoured, everything at once; outputs are compared. Prompts are computed
alike by both: ratios are of the time of steps without them, until all are done (`ratio`) and until a
request is done, on average (`sooner`). Needs the evaluation text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device.worker import Worker
from nanospec.drafters.base import Target
from nanospec.drafters.loading import load_drafter
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.models.hub import resolve_model
from nanospec.models.weights import load_model
from nanospec.text.tokenizer import Tokenizer

KINDS: dict[str, Callable[[int], list[str]]] = {
    "chat": lambda count: common.spec_bench(count, "chat"),
    "code edits": common.code_edits,
}
SYSTEMS: dict[str, Any] = {"K=0": 0, "auto": "auto"}
CACHE = 2 << 30  # bytes for each engine
STAGES = ("propose", "forward", "verify", "wait", "host")  # of a step, but for prompts


def in_turn(engines: dict[str, Engine], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """All prompts on every engine, one step of each at a time: what each took and gave."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    requests: dict[str, list[Request]] = {}
    before = {name: dict(engine.worker.stages.seconds) for name, engine in engines.items()}
    steps = {name: engine.metrics.num_forward_steps for name, engine in engines.items()}
    for name, engine in engines.items():
        requests[name] = [engine.add(prompt, params) for prompt in prompts]
    ended: dict[str, list[float]] = {name: [] for name in engines}

    def ms(name: str) -> dict[str, float]:
        seconds = engines[name].worker.stages.seconds
        return {s: (seconds[s] - before[name][s]) * 1e3 for s in STAGES}

    while any(engine.has_work for engine in engines.values()):
        for name, engine in engines.items():
            if engine.has_work:
                engine.step()
                new = sum(r.is_finished for r in requests[name]) - len(ended[name])
                ended[name] += [sum(ms(name).values())] * new
    found: dict[str, Any] = {}
    for name, engine in engines.items():
        own, count = requests[name], engine.metrics.num_forward_steps - steps[name]
        tokens, total = sum(len(r.output_ids) for r in own), ms(name)
        found[name] = {
            "tokens_per_second": round(tokens / sum(total.values()) * 1e3, 2),
            "mean_ms": round(statistics.mean(ended[name]), 1),
            "steps": count,
            "ms_per_step": {s: round(t / count, 3) for s, t in total.items()},
            "drafted": sum(r.stats.num_drafted for r in own),
            "accepted": sum(r.stats.num_accepted for r in own),
        }
    pairs = zip(requests["K=0"], requests["auto"], strict=True)
    found["differ"] = sum(a.output_ids != b.output_ids for a, b in pairs)
    found["sooner"] = round(found["K=0"]["mean_ms"] / found["auto"]["mean_ms"], 4)
    found["ratio"] = round(found["auto"]["tokens_per_second"] / found["K=0"]["tokens_per_second"], 4)
    return found


def make_engines(name: str, ks: Mapping[str, Any], **more: Any) -> tuple[dict[str, Engine], Tokenizer]:
    """One for each K, by its name; all have the same weights. `more` are fields of `EngineConfig`."""
    folder = resolve_model(name)
    model, tokenizer = load_model(folder, torch.bfloat16, "cpu"), Tokenizer(folder)
    engines: dict[str, Engine] = {}
    for system, k in ks.items():
        spec = SpecConfig(num_speculative_tokens=k)
        config = EngineConfig(spec=spec, max_num_seqs=64, enable_prefix_caching=False, **more)
        drafter = load_drafter(config.spec, Target(model, folder, tokenizer))
        engines[system] = Engine(config, Worker(config, model, drafter), tokenizer)
        engines[system].worker.kv_cache.zero_()  # a system may take 5 ms for a page's first use, once
    return engines, tokenizer


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """A chat of this one message."""
    turn = [{"role": "user", "content": text}]
    return tokenizer.encode(
        tokenizer.apply_chat_template(turn, add_generation_prompt=True), add_special_tokens=False
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)
    engines, tokenizer = make_engines(args.model, SYSTEMS, kv_cache_memory=CACHE)
    cases = []
    for kind in args.kinds:
        for B in args.batches:
            texts = KINDS[kind](min(B * args.rounds, 64))
            prompts = [chat(tokenizer, text) for text in texts]
            rounds = []
            for i in range(args.rounds):
                asked = [prompts[(i * B + j) % len(prompts)] for j in range(B)]
                rounds.append(in_turn(engines, asked, args.max_tokens))
            case = {"kind": kind, "batch": B, "rounds": rounds}
            case["ratio"] = statistics.median(r["ratio"] for r in rounds)
            cases.append(case)
            case["sooner"] = statistics.median(r["sooner"] for r in rounds)
            last = rounds[-1]
            ratios = " ".join(f"{r['ratio']:.3f}" for r in rounds)
            medians = f"{case['ratio']:.3f}x, sooner {case['sooner']:.3f}x"
            print(f"{kind:10} B={B:<3} {medians}: {ratios}", flush=True)
            for name in engines:
                print(f"    {name:5} {last[name]}")
            print("    differ", sum(r["differ"] for r in rounds))
    report = engines["auto"].policy.costs
    result = {"environment": common.environment(), "cases": cases}
    common.save("automatic", {**result, **(report.report() if report else {})}, args.out)


if __name__ == "__main__":
    main()
