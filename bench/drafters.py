"""Compare all drafters: tokens per step and speedup by kind of text.

    python bench/drafters.py [--prompts 4] [--max-tokens 96] [--repeats 3] [--systems ngram eagle3]
                             [--name drafters] [--draft-model smollm2-135m-draft] [--out bench/results]

One process with one copy of the weights runs every system on every prompt, alternating between kinds of text
and systems. Speedups over no speculation are computed per repeat, including prefill; medians are reported.
Decoding is one request at a time, until EOS; the prefix cache is cleared before each repeat. All systems run
greedily, those in `SAMPLED` at temperature 1 too. Kinds of text (of `--prompts` prompts each): six groups of
Spec-Bench (first turns), code edits. Without a draft model, its systems are skipped.

The last part compares the acceptance rules at temperature 1. Requires the evaluation data and an otherwise
idle machine.
"""

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
from nanospec.drafters import Drafter, Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.methods import resolve_drafters
from nanospec.engine.engine import Engine
from nanospec.models.folders import resolve_model
from nanospec.models.weights import load_model

GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag")
SYSTEMS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {},
    "ngram K=8": {"num_speculative_tokens": 8},
    "ngram tree W=2 K=8": {"num_speculative_tokens": 8, "tree_width": 2},
    "ngram tree W=4 K=8": {"num_speculative_tokens": 8, "tree_width": 4},
    "eagle3": {"method": "eagle3"},
    "ngram+eagle3 K=4": {"method": "ngram+eagle3", "num_speculative_tokens": 4},
    "eagle3 tree W=3 K=8": {"method": "eagle3", "num_speculative_tokens": 8, "tree_width": 3},
    "ngram+eagle3": {"method": "ngram+eagle3"},
    "ngram+eagle3 tree W=3": {"method": "ngram+eagle3", "tree_width": 3},
    "draft": {"method": "draft"},
    "draft K=2": {"method": "draft", "num_speculative_tokens": 2},
    "ngram+draft": {"method": "ngram+draft"},
}
LIMITS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 1, "kv_cache_memory": 256 << 20}
SAMPLED = ("none", "ngram", "eagle3", "ngram+eagle3")
RULES = {"eagle3": ("exact", "typical"), "draft": ("exact", "rejection", "typical")}


class Run(NamedTuple):
    """The result of one prompt on one system."""

    token_ids: list[int]
    seconds: float
    steps: int
    drafted: int
    accepted: int
    logprobs: list[float]


class Makers:
    """Creates engines that share the target and the draft model."""

    def __init__(self, llm: LLM, model_name: str, draft_model: str) -> None:
        self.llm, model = llm, llm.engine.worker.model
        self.folder = resolve_model(model_name)
        self.draft: Any = None
        try:
            folder = resolve_model(draft_model)
        except FileNotFoundError as error:
            print(f"Skipping systems with a draft model: {error}")
        else:
            self.draft = load_model(folder, model.dtype, model.device)

    def can(self, method: str) -> bool:
        return "draft" not in method.split("+") or self.draft is not None

    def engine(self, **spec: Any) -> Engine:
        given = SpecConfig(**spec, prompt_lookup_history=False)  # prompts repeat
        config = EngineConfig(spec=given, **LIMITS)
        model, ready = self.llm.engine.worker.model, dict[str, Drafter]()
        if "draft" in config.spec.methods:
            ready["draft"] = ModelDrafter(config.spec, self.draft, model.config.vocab_size)
        methods, target = resolve_drafters(config.spec, None), Target(model, self.folder)
        drafters = [ready.get(each.name) or each.load(config.spec, target) for each in methods]
        return Engine(config, Worker(config, model, drafters), self.llm.engine.tokenizer)


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> Run:
    start = time.perf_counter()
    request = engine.add(prompt, params)
    while engine.has_work:
        engine.step()
    seconds, s = time.perf_counter() - start, request.stats
    logprobs = [next(iter(at.values())).logprob for at in request.logprobs]
    return Run(request.output_ids, seconds, s.num_steps, s.num_drafted, s.num_accepted, logprobs)


def figures(runs: list[Run]) -> dict[str, float]:
    """Return the tokens per step, over all steps, and the acceptance rate."""
    tokens, drafted = sum(len(r.token_ids) for r in runs), max(sum(r.drafted for r in runs), 1)
    return {
        "tokens_per_step": round(tokens / sum(r.steps for r in runs), 3),
        "acceptance": round(sum(r.accepted for r in runs) / drafted, 3),
    }


def compare(
    prompts: dict[str, list[list[int]]],
    systems: dict[str, Engine],
    args: argparse.Namespace,
    temperature: float,
) -> dict[str, Any]:
    """Return by kind and system the figures, the speedup, and the number of outputs that differ."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.max_tokens)
    for engine in systems.values():
        run(engine, prompts["chat"][0], params)  # warm-up
    ratios: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in prompts for name in systems}
    for _ in range(args.repeats):
        last: dict[tuple[str, str], list[Run]] = {key: [] for key in ratios}
        for engine in systems.values():
            engine.abort_all()  # clears the prefix cache
        for i in range(args.prompts):
            for kind, given in prompts.items():
                for name, engine in systems.items():
                    last[kind, name].append(run(engine, given[i], params))
        for kind, name in ratios:
            rate, plain = (
                sum(len(r.token_ids) for r in runs) / sum(r.seconds for r in runs)
                for runs in (last[kind, name], last[kind, "none"])
            )
            ratios[kind, name].append(rate / plain)
    found: dict[str, Any] = {}
    for kind in prompts:
        plain_texts = [r.token_ids for r in last[kind, "none"]]
        found[kind] = {"looping_outputs": sum(map(common.is_looping, plain_texts))}
        for name in systems:
            differing = sum(r.token_ids != ids for r, ids in zip(last[kind, name], plain_texts, strict=True))
            row = {**figures(last[kind, name]), "speedup": common.spread(ratios[kind, name])}
            found[kind][name] = {**row, "outputs_differing": differing}
            print(kind, name, found[kind][name], flush=True)
    return found


def rules(prompts: list[list[int]], makers: Makers, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each acceptance rule at temperature 1, and the mean log-probability of outputs,
    which increases if a rule changes the distribution."""
    found: dict[str, Any] = {}
    for method, rule in ((method, rule) for method, own in RULES.items() for rule in own):
        if makers.can(method):
            engine = makers.engine(method=method, num_speculative_tokens=2, acceptance="typical")
            options: dict[str, Any] = {"max_tokens": args.max_tokens, "acceptance": rule, "logprobs": 0}
            sampling = [SamplingParams(temperature=1, seed=i, **options) for i in range(len(prompts))]
            runs = [run(engine, prompt, params) for prompt, params in zip(prompts, sampling)]
            logprob = round(statistics.mean(x for r in runs for x in r.logprobs), 3)
            found[f"{method} K=2, {rule}"] = {**figures(runs), "mean_logprob": logprob}
    return found


def main() -> None:
    models = {"model": common.MODEL, "draft_model": "smollm2-135m-draft"}
    parser = common.parser(__doc__, **models, name="drafters", repeats=3, prompts=4, max_tokens=96)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    args = parser.parse_args()
    none = SpecConfig(method="none")
    llm = LLM(args.model, spec=none, dtype="bfloat16", **LIMITS)
    makers = Makers(llm, args.model, args.draft_model)
    selected = {name: spec for name, spec in SYSTEMS.items() if name in ("none", *args.systems)}
    possible = {name: spec for name, spec in selected.items() if makers.can(spec.get("method", ""))}
    systems = {name: makers.engine(**spec) for name, spec in possible.items()}
    texts = {group: common.spec_bench(args.prompts, group) for group in GROUPS}
    texts["code edits"] = common.code_edits(args.prompts)
    prompts = {
        kind: [llm.chat_prompt([{"role": "user", "content": text}])[-1500:] for text in own]
        for kind, own in texts.items()
    }
    result: dict[str, Any] = {
        "machine": common.environment(),
        "model": args.model,
        "settings": {"repeats": args.repeats, "prompts": args.prompts, "max_tokens": args.max_tokens},
        "greedy": compare(prompts, systems, args, 0),
        "sampled": compare(prompts, {k: v for k, v in systems.items() if k in SAMPLED}, args, 1),
        "rules": rules(prompts["chat"] + prompts["code edits"], makers, args),
    }
    common.save(args.name, result, args.out)


if __name__ == "__main__":
    main()
