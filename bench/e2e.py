"""Throughput of the running engine over batch sizes, with replayed real text, on random weights.

    python bench/e2e.py [--shape qwen3-0.6b] [--batches 1 4 16 64] [--out bench/results]

Acceptance that means something needs real text, and no real weights fit everywhere: so each request's
output is a reference text (`bench/simulation.py`) while all the work of decoding is done. What is
drafted and accepted is then what n-gram lookup finds in real text. Where the texts or the tokenizer are
not there (`bench/gpu.py pack` collects them), drafts are accepted with a given probability instead; results
say which.

Per batch size: tokens per second of K=0, of fixed Ks and of automatic K, interleaved, and the time per
output token. The baseline is our own K=0 with recorded steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common, roofline
from bench.rows import Rows, release_memory
from bench.rows import run as run_rows
from bench.simulation import ReplayWorker, SyntheticWorker
from bench.steps import load_shape
from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device.worker import Worker
from nanospec.drafters.base import Target
from nanospec.drafters.loading import load_drafter
from nanospec.engine.engine import Engine
from nanospec.models.decoder import Model

Text = tuple[list[int], list[int]]
Make = Callable[[EngineConfig, Model], Worker]
Workloads = dict[str, list[Text]]
SYSTEMS: dict[str, Any] = {"K=0": 0, "auto": "auto", "K=4": 4, "K=8": 8}
REAL = ("code edits", "news", "long quotation")


def measure(out: Rows, args: argparse.Namespace) -> None:
    model, config = load_shape(args.shape, out)
    for make, texts in sources(config.vocab_size, out):
        engines = start(out, model, make, texts, args)
        for batch in args.batches:  # all workloads at each size, as time may run out
            for name, pairs in texts.items():
                what = f"{args.shape} {name} B={batch}"
                if "K=0" in engines and out.has_time(what, args.seconds):
                    with out.attempt(what):
                        compare(out, engines, args.shape, name, pairs, batch, args)
        engines.clear()
        release_memory()


def start(
    out: Rows, model: Model, make: Make, texts: Workloads, args: argparse.Namespace
) -> dict[str, Engine]:
    """An engine for each system, with room for the largest batch of the longest texts."""
    longest = max(len(prompt) for pairs in texts.values() for prompt, _ in pairs)
    engines: dict[str, Engine] = {}
    for name, k in SYSTEMS.items():
        begin = time.perf_counter()
        with out.attempt(f"{args.shape} {name}"):
            engines[name] = make_engine(model, k, max(args.batches), longest + args.max_tokens + 32, make)
        if name == "auto" and name in engines:
            graphs, seconds = engines[name].worker.graphs, time.perf_counter() - begin
            captured = len(graphs.captures) if graphs is not None else 0
            text = f"{args.shape} start: {captured} steps captured and timed in {seconds:.1f} s"
            out.add(text, captured=captured, seconds=seconds)
    return engines


def sources(vocab_size: int, out: Rows) -> list[tuple[Make, Workloads]]:
    """How outputs are made up, and the requests by workload."""
    try:
        from bench.traces import workloads as texts
        from nanospec.models.hub import resolve_model
        from nanospec.text.tokenizer import Tokenizer

        carried = common.CARRY / "tokenizer"
        tokenizer = Tokenizer(carried if carried.is_dir() else resolve_model("smollm2-135m-instruct"))
        if tokenizer.vocab_size > vocab_size:
            raise ValueError("the shape's vocabulary is smaller than the tokenizer's")
        found = {f"replay: {name}": pairs for name, pairs in texts(tokenizer).items() if name in REAL}
    except (FileNotFoundError, ValueError) as error:
        why = str(error).splitlines()[0]
        out.add(f"no replay of real text ({why}); acceptance is synthetic", headline=True, missing="texts")
        synthetic: list[Text] = [([i % 29 + n % 3 for i in range(300 + n)], []) for n in range(64)]
        return [(partial(SyntheticWorker, a), {f"synthetic {a}": synthetic}) for a in (0.0, 0.6, 0.9)]
    return [(partial(replay, [pair for pairs in found.values() for pair in pairs]), found)]


def compare(
    out: Rows, engines: dict[str, Engine], shape: str, workload: str, texts: list[Text], batch: int,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """One row per system at this batch size; the systems take turns, and a first round is not counted if
    there is time for more."""
    asked = [texts[i % len(texts)] for i in range(batch)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    begin = time.time()
    for i in range(args.repeats + 1):
        if i == 0 or out.left() > 1.3 * (time.time() - begin) / i:
            for name, engine in engines.items():
                runs[name].append(run(engine, asked, args.max_tokens))
    for name, engine in engines.items():
        counted = runs[name][1:] or runs[name]
        base = [r["tokens_per_second"] for r in runs["K=0"][1:] or runs["K=0"]]
        rates = [r["tokens_per_second"] for r in counted]
        row: dict[str, Any] = {
            "shape": shape, "workload": workload, "batch": batch, "system": name,
            "repeats": len(runs[name]) - 1,
            "tokens_per_second": common.spread(rates),
            "speedup": common.spread([a / b for a, b in zip(rates, base, strict=True)]),
            "ms_per_token": round(statistics.median(r["ms_per_token"] for r in counted), 4),
            "tokens_per_step": round(counted[-1]["tokens_per_step"], 3),
            "acceptance": round(counted[-1]["acceptance"], 3),
            "simulated": engine.metrics.simulated,
            "fallbacks": engine.worker.graphs.fallbacks if engine.worker.graphs else None,
        }  # fmt: skip
        text = f"{shape} {workload:24} B={batch:<3} {name:5} {row['tokens_per_second']['median']:9.0f} tok/s"
        text += f" {row['speedup']['median']:5.2f}x  {row['tokens_per_step']:.2f} tokens per step"
        out.add(text, headline=name in ("K=4", "auto"), **row)


def replay(pairs: list[Text], config: EngineConfig, model: Model) -> Worker:
    drafter = load_drafter(config.spec, Target(model))
    return ReplayWorker(config, model, drafter, {tuple(prompt): text for prompt, text in pairs})


def make_engine(model: Model, k: Any, batch: int, window: int, make: Make) -> Engine:
    config = EngineConfig(
        spec=SpecConfig(num_speculative_tokens=k),
        max_num_seqs=batch,
        max_model_len=window,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        kv_cache_memory=(batch + 1) * -(-window // 16) * 16 * model.config.kv_bytes_per_token(model.dtype),
        lazy_capture=k != "auto",
    )
    return Engine(config, make(config, model))


def run(engine: Engine, asked: list[Text], max_tokens: int) -> dict[str, float]:
    """All requests at once: tokens per second of the whole, median ms per token of a request, and what
    its drafts brought."""
    start = time.perf_counter()
    requests = []
    for prompt, reference in asked:
        count = min(len(reference) or max_tokens, max_tokens)
        requests.append(engine.add(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    per_token = [
        ((r.finish_time or 0.0) - (r.first_token_time or 0.0)) / max(len(r.output_ids) - 1, 1) * 1e3
        for r in requests
    ]
    steps, drafted = (sum(getattr(r.stats, name) for r in requests) for name in ("num_steps", "num_drafted"))
    return {
        "tokens_per_second": sum(len(r.output_ids) for r in requests) / seconds,
        "ms_per_token": statistics.median(per_token),
        "tokens_per_step": sum(r.stats.num_tokens for r in requests) / max(steps, 1),
        "acceptance": sum(r.stats.num_accepted for r in requests) / max(drafted, 1),
    }


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*roofline.MODELS, "tiny"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="that one batch size may take, about")
    run_rows("e2e", measure, parser, argv)


if __name__ == "__main__":
    main()
