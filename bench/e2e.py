"""Throughput of the running engine over batch sizes, with replayed real text, on random weights.

    python bench/e2e.py [--shapes qwen3-0.6b] [--batches 1 4 16 64] [--out bench/results]

Acceptance that means something needs real text, and no real weights fit everywhere: so each request's
output is a reference text (`nanospec.simulation.Replay`) while all the work of decoding is done. What is
drafted and accepted is then what n-gram lookup finds in real text. Where the texts or the tokenizer are
not there, drafts are accepted with a given probability instead (`Synthetic`); results say which.

Per batch size: tokens per second of K=0, of fixed Ks and of automatic K, interleaved, and the time per
output token. The baseline is our own K=0 with recorded steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common, roofline
from bench.simulation import ReplayWorker, SyntheticWorker
from bench.steps import TINY
from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.drafters.base import Target
from nanospec.drafters.loading import load_drafter
from nanospec.engine import Engine
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.worker import Worker

Text = tuple[list[int], list[int]]
Make = Callable[[EngineConfig, Model], Worker]
Jobs = tuple[Make, list[Text]]
SYSTEMS: dict[str, Any] = {"K=0": 0, "K=4": 4, "K=8": 8, "auto": "auto"}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"machine": common.environment(), "shapes": {}}
    for shape in args.shapes:
        config = ModelConfig.from_dict(TINY) if shape == "tiny" else roofline.MODELS[shape]
        model = Model.random(config, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
        rows = [
            row
            for name, jobs in workloads(config.vocab_size).items()
            for batch in args.batches
            for row in measure(model, shape, name, jobs, batch, args)
        ]
        result["shapes"][shape] = rows
        del model
        gc.collect()
    common.save("e2e", result, args.out)


def workloads(vocab_size: int) -> dict[str, Jobs]:
    """How outputs are made up, and the requests, by name."""
    try:
        from bench.traces import workloads as texts
        from nanospec.models.hub import resolve_model
        from nanospec.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(resolve_model("smollm2-135m-instruct"))
        if tokenizer.vocab_size > vocab_size:
            raise ValueError("the shape's vocabulary is smaller than the tokenizer's")
        found = {name: pairs for name, pairs in texts(tokenizer).items() if name in REAL}
    except (FileNotFoundError, ValueError) as error:
        print(f"No replay of real text ({str(error).splitlines()[0]}); acceptance is synthetic.")
        synthetic: list[Text] = [([i % 29 + n % 3 for i in range(300 + n)], []) for n in range(64)]
        return {f"synthetic {a}": (partial(SyntheticWorker, a), synthetic) for a in (0.0, 0.6, 0.9)}
    return {
        f"replay: {name}": (partial(replay, pairs), pairs)
        for name, pairs in found.items()
    }


REAL = ("code edits", "news", "long quotation")


def measure(
    model: Model, shape: str, workload: str, jobs: Jobs, batch: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per system at this batch size."""
    make, texts = jobs
    asked = [texts[i % len(texts)] for i in range(batch)]
    window = max(len(prompt) for prompt, _ in asked) + args.max_tokens + 32
    try:
        engines = {name: make_engine(model, k, batch, window, make) for name, k in SYSTEMS.items()}
    except (ValueError, torch.cuda.OutOfMemoryError) as error:
        print(f"{shape} {workload} B={batch}: left out ({str(error).splitlines()[0]})")
        return []
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(args.repeats + 1):
        for name, engine in engines.items():
            runs[name].append(run(engine, asked, args.max_tokens))
    rows = []
    for name, engine in engines.items():
        rates = [r["tokens_per_second"] for r in runs[name][1:]]
        ratios = [a / b["tokens_per_second"] for a, b in zip(rates, runs["K=0"][1:], strict=True)]
        row: dict[str, Any] = {
            "workload": workload, "batch": batch, "system": name,
            "tokens_per_second": common.spread(rates), "speedup": common.spread(ratios),
            "ms_per_token": round(statistics.median(r["ms_per_token"] for r in runs[name][1:]), 4),
            "tokens_per_step": round(engine.metrics.spec.tokens_per_step, 3),
            "acceptance": round(engine.metrics.spec.acceptance_rate, 3),
            "simulated": engine.metrics.simulated,
            "fallbacks": engine.worker.graphs.fallbacks if engine.worker.graphs else None,
        }  # fmt: skip
        rate, speedup = row["tokens_per_second"]["median"], row["speedup"]["median"]
        print(
            f"{shape} {workload:24} B={batch:<3} {name:5} {rate:9.0f} tok/s {speedup:5.2f}x  "
            f"{row['tokens_per_step']:.2f} tokens per step",
            flush=True,
        )
        rows.append(row)
    return rows


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
    """All requests at once: tokens per second of the whole, median ms per token of a request."""
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
    return {
        "tokens_per_second": sum(len(r.output_ids) for r in requests) / seconds,
        "ms_per_token": statistics.median(per_token),
    }


if __name__ == "__main__":
    main()
