"""Every way of guessing, side by side: tokens per step and speed-up by kind of text, on a CPU.

    python bench/drafters.py [--prompts 4] [--max-tokens 96] [--repeats 3] [--out bench/results]
                             [--systems ngram medusa] [--name drafters] [--draft-model smollm2-135m-draft]

One process and one copy of the weights; every system on every prompt in turn, the kinds of text in turn, all
of it repeated; ratios to no speculation are taken within a repeat, and their median is reported. Greedy and
at temperature 1, one request at a time, with prefill and without, EOS honoured. Kinds: Spec-Bench's six
groups (first turns) and code edits. Cached pages are forgotten before each repeat.
Without a draft model the systems that need it are left out.

The last part compares the rules of acceptance by what they accept at temperature 1. Needs the evaluation
text; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device.worker import Worker
from nanospec.drafters.base import Drafter, Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.loading import load_drafter
from nanospec.drafters.medusa import MedusaDrafter
from nanospec.engine.engine import Engine
from nanospec.models.heads import Heads
from nanospec.models.hub import default_heads, resolve_model
from nanospec.models.token_map import load_token_map
from nanospec.models.weights import load_model

GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag")
SYSTEMS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {},
    "ngram K=8": {"num_speculative_tokens": 8},
    "ngram tree W=2 K=8": {"num_speculative_tokens": 8, "tree_width": 2},
    "ngram tree W=4 K=8": {"num_speculative_tokens": 8, "tree_width": 4},
    "medusa": {"method": "medusa"},
    "medusa K=2": {"method": "medusa", "num_speculative_tokens": 2},
    "medusa tree W=3 K=6": {"method": "medusa", "num_speculative_tokens": 6, "tree_width": 3},
    "ngram+medusa": {"method": "ngram+medusa"},
    "draft": {"method": "draft"},
    "draft K=2": {"method": "draft", "num_speculative_tokens": 2},
    "ngram+draft": {"method": "ngram+draft"},
}
SAMPLED = ("none", "ngram", "ngram+medusa")
RULES = ("exact", "rejection", "typical")


class Run(NamedTuple):
    """One prompt on one system."""

    token_ids: list[int]
    seconds: float
    first: float  # seconds until the first step has ended
    ahead: int  # tokens of that
    steps: int
    drafted: int
    accepted: int
    logprobs: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft-model", default="smollm2-135m-draft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="per kind of text")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--name", default="drafters", help="of the file of results")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()

    none = SpecConfig(method="none")
    llm = LLM(args.model, spec=none, dtype="bfloat16", max_model_len=2048, max_num_seqs=1)
    makers = Makers(llm, args.model, args.draft_model)
    asked = {name: spec for name, spec in SYSTEMS.items() if name in ("none", *args.systems)}
    systems = {name: makers.engine(**spec) for name, spec in asked.items() if makers.can(spec)}
    kinds = {group: common.spec_bench(args.prompts, group) for group in GROUPS}
    kinds["code edits"] = common.code_edits(args.prompts)
    prompts = {
        kind: [llm.chat_prompt([{"role": "user", "content": text}])[-1500:] for text in texts]
        for kind, texts in kinds.items()
    }
    result: dict[str, Any] = {
        "machine": common.environment(),
        "model": args.model,
        "settings": {"repeats": args.repeats, "prompts": args.prompts, "max_tokens": args.max_tokens},
    }
    sampled = {name: systems[name] for name in SAMPLED if name in systems}
    for key, temperature, compared in (("greedy", 0.0, systems), ("sampled", 1.0, sampled)):
        result[key] = compare(prompts, compared, temperature, args)
        for kind, table in result[key].items():
            show(f"{kind}, {key}", table)
    result["rules"] = rules(prompts["chat"] + prompts["code edits"], makers, args)
    for name, row in result["rules"].items():
        print(f"{name:30} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    common.save(args.name, result, args.out)


class Speed(NamedTuple):
    """Tokens per second, and those behind the first step, which what prompts take does not dilute."""

    whole: float
    behind: float

    @classmethod
    def of(cls, runs: list[Run]) -> Speed:
        tokens, seconds = sum(len(r.token_ids) for r in runs), sum(r.seconds for r in runs)
        behind = sum(len(r.token_ids) - r.ahead for r in runs), sum(r.seconds - r.first for r in runs)
        return cls(tokens / seconds, behind[0] / behind[1])


class Makers:
    """Engines that share the target, the draft model and the heads."""

    def __init__(self, llm: LLM, model_name: str, draft_model: str) -> None:
        self.llm, model = llm, llm.engine.worker.model
        self.parts: dict[str, Any] = {}
        try:
            folder = resolve_model(draft_model)
            self.parts["draft"] = load_model(folder, model.dtype, model.device)
            self.parts["token_map"] = load_token_map(folder, model.config.vocab_size)
        except FileNotFoundError as error:
            print(f"without a draft model: {error}")
        self.parts["medusa"] = Heads.load(default_heads(resolve_model(model_name)), model)

    def can(self, spec: dict[str, Any]) -> bool:
        return "draft" not in spec.get("method", "") or "draft" in self.parts

    def engine(self, **spec: Any) -> Engine:
        config = EngineConfig(spec=SpecConfig(**spec), max_model_len=2048, max_num_seqs=1)
        model, methods, ready = self.llm.engine.worker.model, config.spec.methods, dict[str, Drafter]()
        if "draft" in methods:
            parts = self.parts["draft"], model.config.vocab_size, self.parts["token_map"]
            ready["draft"] = ModelDrafter(config.spec, *parts)
        if "medusa" in methods:
            ready["medusa"] = MedusaDrafter(config.spec, self.parts["medusa"], model)
        drafter = load_drafter(config.spec, Target(model), ready)
        return Engine(config, Worker(config, model, drafter), self.llm.engine.tokenizer)


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> Run:
    start = time.perf_counter()
    request = engine.add(prompt, params)
    while not request.output_ids:
        engine.step()
    first, ahead = time.perf_counter() - start, len(request.output_ids)
    while engine.has_work:
        engine.step()
    seconds, s = time.perf_counter() - start, request.stats
    logprobs = [next(iter(at.values())).logprob for at in request.logprobs]
    counts = s.num_steps, s.num_drafted, s.num_accepted
    return Run(request.output_ids, seconds, first, ahead, *counts, logprobs)


def compare(
    prompts: dict[str, list[list[int]]],
    systems: dict[str, Engine],
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """By kind and system: tokens per step over all steps, speed-up over none, outputs unlike none's."""
    for engine in systems.values():
        run(engine, prompts["chat"][0], SamplingParams(temperature=0, max_tokens=args.max_tokens))  # warm up
    ratios: dict[tuple[str, str], list[Speed]] = {(kind, name): [] for kind in prompts for name in systems}
    last: dict[tuple[str, str], list[Run]] = {}
    for _ in range(args.repeats):
        last = {key: [] for key in ratios}
        for engine in systems.values():
            forget(engine)
        for seed in range(args.prompts):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=args.max_tokens)
            for kind, given in prompts.items():
                for name, engine in systems.items():
                    last[kind, name].append(run(engine, given[seed], params))
        for kind, name in ratios:
            rate, plain = (Speed.of(last[kind, system]) for system in (name, "none"))
            ratios[kind, name].append(Speed(*(a / b for a, b in zip(rate, plain, strict=True))))
    return {kind: table_of(kind, systems, last, ratios) for kind in prompts}


def forget(engine: Engine) -> None:
    """Drop the engine's cached pages."""
    engine.abort_all()


def table_of(
    kind: str,
    systems: dict[str, Engine],
    last: dict[tuple[str, str], list[Run]],
    ratios: dict[tuple[str, str], list[Speed]],
) -> dict[str, Any]:
    """What one kind of text gave."""
    table: dict[str, Any] = {}
    plain = last[kind, "none"]
    for name in systems:
        runs = last[kind, name]
        table[name] = {
            "tokens_per_step": round(sum(len(r.token_ids) for r in runs) / sum(r.steps for r in runs), 3),
            "acceptance": round(sum(r.accepted for r in runs) / max(sum(r.drafted for r in runs), 1), 3),
            "speedup": common.spread([ratio.whole for ratio in ratios[kind, name]]),
            "speedup_behind_prompt": common.spread([ratio.behind for ratio in ratios[kind, name]]),
            "outputs_differing": sum(a.token_ids != b.token_ids for a, b in zip(runs, plain, strict=True)),
        }
    texts = [r.token_ids for r in plain]
    table["looping_outputs"] = sum(map(common.is_looping, texts))
    table["distinct_4grams"] = round(statistics.mean(map(common.distinct_ratio, texts)), 3)
    return table


def show(kind: str, table: dict[str, Any]) -> None:
    print(f"\n{kind} ({table['looping_outputs']} looping outputs)")
    for name, row in table.items():
        if isinstance(row, dict):
            speedup, behind = row["speedup"], row["speedup_behind_prompt"]["median"]
            print(
                f"  {name:22} {row['tokens_per_step']:5.2f} tokens per step  "
                f"{row['acceptance']:4.0%} accepted  "
                f"{speedup['median']:5.2f}x ({speedup['min']:.2f}-{speedup['max']:.2f})  "
                f"{behind:5.2f}x behind the prompt  "
                f"{row['outputs_differing']} differ",
                flush=True,
            )


def rules(prompts: list[list[int]], makers: Makers, args: argparse.Namespace) -> dict[str, Any]:
    """Sampled at temperature 1: what each rule accepts, with the drafters for which it matters, and how
    likely the target finds what comes out: that grows where a rule changes the output."""
    found: dict[str, Any] = {}
    for spec in ({"method": "medusa"}, {"method": "draft"}):
        if not makers.can(spec):
            continue
        engine = makers.engine(**spec, num_speculative_tokens=2, acceptance="typical")
        for rule in RULES:
            if rule == "rejection" and spec["method"] == "medusa":
                continue  # point guesses: the same as exact
            params = [
                SamplingParams(temperature=1, seed=i, max_tokens=args.max_tokens, acceptance=rule, logprobs=0)
                for i in range(len(prompts))
            ]
            runs = [run(engine, prompt, asked) for prompt, asked in zip(prompts, params)]
            found[f"{spec['method']} K=2, {rule}"] = {
                "tokens_per_step": round(sum(len(r.token_ids) for r in runs) / sum(r.steps for r in runs), 3),
                "acceptance": round(sum(r.accepted for r in runs) / sum(r.drafted for r in runs), 3),
                "mean_logprob": round(statistics.mean(x for r in runs for x in r.logprobs), 3),
            }
    return found


if __name__ == "__main__":
    main()
