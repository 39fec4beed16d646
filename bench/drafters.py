"""Compare drafters and speculation lengths: tokens per step and speedup by kind of text.

    python bench/drafters.py [--systems ngram "ngram tree W=2 K=8" eagle3 "ngram K=4"] [--kinds chat rag]
                             [--batches 1 16] [--temperatures 0 1] [--prompts 4] [--max-tokens 96]
                             [--rounds 3] [--name drafters] [--out bench/results]

A system is a drafting method, optionally with a draft model ("draft:FOLDER"), a fixed K and a tree width W.
One process with one copy of the weights has an engine for each system and one without speculation ("none").
The engines run the same batch of prompts and alternate after every step, so that other load on the machine
affects all of them equally. Decoding ends at EOS. The speedups over "none" are computed per round, by all
time in the engine (`speedup`) and without prefill (`decoding`); medians and ranges are reported. Kinds of
text (at least `--prompts` prompts each): six groups of Spec-Bench (first turns), code edits, and quotations
of news articles. Requires the evaluation data.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common
from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device.worker import Worker
from nanospec.drafters import Target
from nanospec.drafters.methods import load_drafters
from nanospec.engine.engine import Engine
from nanospec.models.folders import resolve_model
from nanospec.models.weights import load_model
from nanospec.text.tokenizer import Tokenizer

Json = dict[str, Any]
Runs = dict[str, Json]  # the results of a batch, or of all batches of a case, by system
GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag")
KINDS: dict[str, Callable[[int], list[str]]] = {
    **{group: partial(common.spec_bench, group=group) for group in GROUPS},
    "code edits": common.code_edits,
    "quotations": common.quotations,
}
SYSTEMS = ("ngram", "ngram tree W=2 K=8", "eagle3", "ngram+eagle3")
CACHE = 512 << 20  # bytes of KV cache per engine: 16 requests of a thousand tokens


def spec_of(system: str) -> SpecConfig:
    """Return the settings of a system. Lookup in earlier requests is off, since prompts repeat."""
    method, _, draft_model = system.split()[0].partition(":")
    numbers = {name: int(value) for name, value in re.findall(r"\b([KW])=(\d+)", system)}
    return SpecConfig(
        method, draft_model or None, tree_width=numbers.get("W", 1),
        num_speculative_tokens=numbers.get("K", "auto"), prompt_lookup_history=False,
    )  # fmt: skip


def make_engines(folder: Path, tokenizer: Tokenizer, systems: Sequence[str], rows: int) -> dict[str, Engine]:
    """Return an engine for each system, all with the same weights."""
    model, engines = load_model(folder, torch.bfloat16, "cpu"), {}
    for system in systems:
        config = EngineConfig(
            spec=spec_of(system), max_num_seqs=rows, enable_prefix_caching=False, max_model_len=2048,
            kv_cache_memory=CACHE,
        )  # fmt: skip
        worker = Worker(config, model, load_drafters(config.spec, Target(model, folder, tokenizer)))
        worker.kv_cache.zero_()  # the first write to a memory page can take 5 ms
        engines[system] = Engine(config, worker, tokenizer)
    return engines


def seconds(engine: Engine) -> dict[str, float]:
    """Return the seconds that an engine has spent so far, and those without prefill."""
    stages = {name: stage.seconds for name, stage in engine.worker.stages.items()}
    return {"seconds": sum(stages.values()), "decoding": sum(stages.values()) - stages["prefill"]}


def race(engines: dict[str, Engine], prompts: Sequence[list[int]], params: SamplingParams) -> Runs:
    """Run all prompts as a batch on every engine, alternating after each step."""
    start = {name: seconds(engine) for name, engine in engines.items()}
    requests = {name: [engine.add(prompt, params) for prompt in prompts] for name, engine in engines.items()}
    while any(engine.has_work for engine in engines.values()):
        for engine in engines.values():
            if engine.has_work:
                engine.step()
    found = {}
    for name, engine in engines.items():
        stats = [request.stats for request in requests[name]]
        found[name] = {
            **{key: value - start[name][key] for key, value in seconds(engine).items()},
            "tokens": sum(s.num_tokens for s in stats), "steps": sum(s.num_steps for s in stats),
            "drafted": sum(s.num_drafted for s in stats), "accepted": sum(s.num_accepted for s in stats),
            "outputs": [request.output_ids for request in requests[name]],
        }  # fmt: skip
    return found


def together(batches: Sequence[Runs]) -> Runs:
    """Add up the numbers of several batches, and concatenate their outputs."""
    return {
        system: {key: sum((runs[system][key] for runs in batches[1:]), run[key]) for key in run}
        for system, run in batches[0].items()
    }


def compare(
    engines: dict[str, Engine], batches: Sequence[Sequence[list[int]]], params: SamplingParams, count: int
) -> Json:
    """Return the figures of each system over `count` rounds. Outputs are the same in every round."""
    race(engines, batches[0][:1], params)  # warm-up
    rounds = [together([race(engines, prompts, params) for prompts in batches]) for _ in range(count)]
    plain = [runs["none"] for runs in rounds]
    found: Json = {"looping_outputs": sum(map(common.is_looping, plain[-1]["outputs"]))}
    for name, last in rounds[-1].items():
        runs = [each[name] for each in rounds]
        speedups = {
            key: common.spread([(r["tokens"] / r[by]) / (p["tokens"] / p[by]) for r, p in zip(runs, plain)])
            for key, by in (("speedup", "seconds"), ("decoding", "decoding"))
        }
        found[name] = {
            "tokens_per_step": round(last["tokens"] / last["steps"], 3),
            "acceptance": round(last["accepted"] / max(last["drafted"], 1), 3), **speedups,
            "outputs_differing": sum(a != b for a, b in zip(last["outputs"], plain[-1]["outputs"])),
        }  # fmt: skip
    return found


def main() -> None:
    parser = common.parser(__doc__, model=common.MODEL, name="drafters", rounds=3, prompts=4, max_tokens=96)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*GROUPS, "code edits"], metavar="KIND")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="batch sizes")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    args = parser.parse_args()
    folder = resolve_model(args.model)
    tokenizer = Tokenizer(folder)
    engines = make_engines(folder, tokenizer, ["none", *args.systems], max(args.batches))
    found: Json = {}
    for temperature in args.temperatures:
        cases = found.setdefault("sampled" if temperature else "greedy", {})
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.max_tokens)
        for kind in args.kinds:
            for B in args.batches:
                texts = KINDS[kind](-(-args.prompts // B) * B)
                prompts = [common.chat_prompt(tokenizer, text)[-1500:] for text in texts]
                batches = [prompts[i : i + B] for i in range(0, len(prompts), B)]
                case = f"{kind}, B={B}" if B > 1 else kind
                cases[case] = compare(engines, batches, params, args.rounds)
                for name in engines:
                    print(case, name, cases[case][name], flush=True)
    settings = {name: getattr(args, name) for name in ("rounds", "prompts", "max_tokens")}
    result = {"machine": common.environment(), "model": args.model, "settings": settings, **found}
    costs = engines["ngram"].policy.costs if "ngram" in engines else None
    common.save(args.name, {**result, **(costs.report() if costs else {})}, args.out)


if __name__ == "__main__":
    main()
