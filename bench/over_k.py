"""Measure the cost and benefit of each speculation length K, and of automatic K.

    python bench/over_k.py [--ks 0 1 2 3 4 6 8 12 16 auto] [--batches 1 16] [--prompts 8] [--rounds 3]
                           [--name over_k] [--out bench/results]

One process with one copy of the weights has an engine for each fixed K and one for automatic K. The engines
alternate after every step, so that other load on the machine affects them equally. Drafts are from n-gram
lookup; decoding is greedy, until EOS, with the same prompts for all, at least `--prompts` per kind of text.
Times in ms exclude prefill. Speedups are computed per round, by the time until the last request has finished
(`speedup`) and by the mean time until a request has finished (`sooner`); the median and range over the rounds
are reported. `drafts` counts rows by their number of drafts. `python -m bench.pictures` draws the results. To
measure automatic K alone, use `--ks 0 auto --batches 1 4 16 64 --name automatic`. Requires the evaluation
data.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
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
KINDS: dict[str, Callable[[int], list[str]]] = {
    "quotations": common.quotations,
    "code edits": common.code_edits,
    "chat": lambda count: common.spec_bench(count, "chat"),
}
KS = ["0", "1", "2", "3", "4", "6", "8", "12", "16", "auto"]
CACHE = 512 << 20  # bytes of KV cache per engine: 16 requests of a thousand tokens
STAGES = ("propose", "forward", "verify", "wait", "host")  # all stages except prefill


def make_engines(model_name: str, ks: Sequence[str]) -> tuple[dict[str, Engine], Tokenizer]:
    """Return an engine for each K, all with the same weights, and the tokenizer."""
    folder = resolve_model(model_name)
    model, tokenizer = load_model(folder, torch.bfloat16, "cpu"), Tokenizer(folder)
    engines = {}
    for name in ks:
        k: Any = name if name == "auto" else int(name)
        config = EngineConfig(
            spec=SpecConfig(num_speculative_tokens=k), max_num_seqs=64, enable_prefix_caching=False,
            max_model_len=2048, kv_cache_memory=CACHE,
        )  # fmt: skip
        drafters = load_drafters(config.spec, Target(model, folder, tokenizer))
        engines[name] = Engine(config, Worker(config, model, drafters), tokenizer)
        engines[name].worker.kv_cache.zero_()  # the first write to a memory page can take 5 ms
    return engines, tokenizer


def spent(engine: Engine) -> float:
    """Return the ms that an engine has spent so far, without prefill."""
    return 1e3 * sum(engine.worker.stages[stage].seconds for stage in STAGES)


def race(engines: dict[str, Engine], prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Json]:
    """Run all prompts as a batch on every engine, alternating after each step."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    start = {name: (spent(engine), engine.metrics.num_forward_steps) for name, engine in engines.items()}
    requests = {name: [engine.add(prompt, params) for prompt in prompts] for name, engine in engines.items()}
    done: dict[str, list[float]] = {name: [] for name in engines}
    while any(engine.has_work for engine in engines.values()):
        for name, engine in engines.items():
            if engine.has_work:
                engine.step()
                new = sum(request.is_finished for request in requests[name]) - len(done[name])
                done[name] += [spent(engine) - start[name][0]] * new
    found = {}
    for name, engine in engines.items():
        stats = [request.stats for request in requests[name]]
        drafted = zip_longest(*(s.drafted_by_position for s in stats), fillvalue=0)
        found[name] = {
            "ms": spent(engine) - start[name][0],
            "done_ms": sum(done[name]),
            "steps": engine.metrics.num_forward_steps - start[name][1],
            "rows": sum(s.num_steps for s in stats),
            "tokens": sum(s.num_tokens for s in stats),
            "drafted": [sum(at) for at in drafted],  # [i]: the number of rows with more than i drafts
            "outputs": [request.output_ids for request in requests[name]],
        }
    return found


def together(runs: Sequence[Json]) -> Json:
    """Combine the runs of several batches into one."""
    found = {name: sum(run[name] for run in runs) for name in ("ms", "done_ms", "steps", "rows", "tokens")}
    drafted = [sum(at) for at in zip_longest(*(run["drafted"] for run in runs), fillvalue=0)]
    return {**found, "drafted": drafted, "outputs": [o for run in runs for o in run["outputs"]]}


def summary(rounds: Sequence[dict[str, Json]]) -> list[Json]:
    """Return a row for each K. Drafts and outputs are the same in every round."""
    rows = []
    for name in rounds[0]:
        runs, plain = [r[name] for r in rounds], [r["0"] for r in rounds]
        last = runs[-1]
        more = [last["rows"], *last["drafted"], 0]
        rates = [run["tokens"] / run["ms"] for run in runs]
        speedups = [rate / (p["tokens"] / p["ms"]) for rate, p in zip(rates, plain)]
        rows.append({
            "k": name,
            "tokens_per_step": round(last["tokens"] / last["rows"], 3),
            "drafts_per_step": round(sum(last["drafted"]) / last["rows"], 3),
            "drafts": {k: n - m for k, (n, m) in enumerate(pairwise(more)) if n > m},
            "ms_per_step": common.spread([run["ms"] / run["steps"] for run in runs]),
            "tokens_per_second": common.spread([1e3 * rate for rate in rates]),
            "speedup": common.spread(speedups),
            "sooner": common.spread([p["done_ms"] / run["done_ms"] for run, p in zip(runs, plain)]),
            "differing": sum(a != b for a, b in zip(last["outputs"], plain[-1]["outputs"])),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = common.parser(__doc__, model=common.MODEL, name="over_k", rounds=3, prompts=8, max_tokens=96)
    parser.add_argument("--ks", nargs="+", default=KS, help="values of K; must include 0, the baseline")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="batch sizes")
    args = parser.parse_args()
    engines, tokenizer = make_engines(args.model, args.ks)
    rows = []
    for kind, texts in KINDS.items():
        for B in args.batches:
            prompts = [common.chat_prompt(tokenizer, t)[-1500:] for t in texts(-(-args.prompts // B) * B)]
            waves = [prompts[i : i + B] for i in range(0, len(prompts), B)]
            rounds = []
            for _ in range(args.rounds):
                ran = [race(engines, wave, args.max_tokens) for wave in waves]
                rounds.append({name: together([found[name] for found in ran]) for name in engines})
            for row in summary(rounds):
                rows.append({"kind": kind, "batch": B, **row})
                ms = row["ms_per_step"]["median"]
                details = f"{row['tokens_per_step']:6.2f} tokens per step, {ms:6.2f} ms"
                ratios = f"{row['speedup']['median']:5.2f}x, sooner {row['sooner']['median']:.2f}x"
                print(f"{kind:10} B={B:<3} K={row['k']:4} {details}, {ratios}", flush=True)
    settings = {name: getattr(args, name) for name in ("batches", "prompts", "rounds", "max_tokens")}
    result = {"environment": common.environment(), "model": Path(args.model).name, "settings": settings}
    costs = engines["auto"].policy.costs if "auto" in engines else None
    common.save(args.name, {**result, "rows": rows, **(costs.report() if costs else {})}, args.out)


if __name__ == "__main__":
    main()
