"""Time whole recorded steps by batch size and K, as share of the roofline, on random weights.

    python bench/steps.py [--shapes qwen3-0.6b qwen3-8b] [--contexts 1024 8192] [--out bench/results]

Shapes are those of real models, weights are random and made on the device: a step's time does not
depend on what the weights are. Every row drafts K tokens (periodic text), so all work is done. Per
bucket: ms of a replay (median), ms of the parts replayed alone, the roofline at the measured copy
bandwidth and matrix rate (`bench/roofline.py`), and how long the host leaves the device idle between
two steps of a running engine. Of the first shape also the steps of the other drafters. Without a GPU
`--shapes tiny` runs the same code eagerly, for tests.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common, roofline
from bench.simulation import SyntheticWorker
from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device import synchronize
from nanospec.drafters.base import Drafter, guesses, nothing
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.medusa import MedusaDrafter
from nanospec.drafters.ngram import NgramDrafter
from nanospec.engine import Engine
from nanospec.graphs import Bucket
from nanospec.kernels.speculation.layout import lay_out
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.models.heads import Heads
from nanospec.timing import replay_ms
from nanospec.worker import Worker

Make = Callable[[SpecConfig], Drafter]
BATCHES, KS = (1, 4, 8, 16, 64), (0, 1, 2, 4, 8, 16)
TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--ks", nargs="+", type=int, default=list(KS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = ceilings(device)
    print(f"copy {machine['bandwidth'] / 1e12:.2f} TB/s, matrix {machine['flops'] / 1e12:.0f} TFLOP/s")
    result: dict[str, Any] = {"machine": {**common.environment(), **machine}, "shapes": {}}
    for shape in args.shapes:
        config = ModelConfig.from_dict(TINY) if shape == "tiny" else roofline.MODELS[shape]
        model = Model.random(config, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
        rows = [row for context in args.contexts for row in measure(model, shape, context, machine, args)]
        drafters = by_drafter(model, shape, machine, args) if shape == args.shapes[0] else {}
        gap = host_gap(model, args)
        print(f"{shape}: host gap {gap['gap_share']:.1%} of a step of {gap['replay_ms']:.3f} ms")
        result["shapes"][shape] = {"steps": rows, "by_drafter": drafters, "host_gap": gap}
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    common.save("steps", result, args.out)


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes and operations per second that this machine reaches."""
    if device.type != "cuda":
        return {"bandwidth": 2e10, "flops": 2e11}  # only so that the code runs
    from bench.kernels import copy_bandwidth, matrix_rate

    return {"bandwidth": copy_bandwidth(), "flops": matrix_rate()}


def make_engine(
    model: Model, batch: int, window: int, k: int, make: Make | None = None, **guess: Any
) -> Engine:
    """An engine without captures, with room for `batch` rows of `window` tokens. `make`: makes the
    drafter; None for n-gram lookup. `guess`: fields of `SpecConfig`."""
    spec = SpecConfig(num_speculative_tokens=k, prompt_lookup_min=1, **guess)
    drafter = make(spec) if make is not None else NgramDrafter(spec)
    per_token = model.config.kv_bytes_per_token(model.dtype) + drafter.kv_bytes_per_token
    config = EngineConfig(
        spec=spec,
        max_num_seqs=batch,
        max_model_len=window,
        kv_cache_memory=(batch * -(-window // 16) + 1) * 16 * per_token,
        enforce_eager=False,
        lazy_capture=True,
    )
    return Engine(config, Worker(config, model, drafter))


def by_drafter(
    model: Model, shape: str, machine: dict[str, float], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Steps of the other drafters at the shortest context: trees, a draft model of two of the target's
    layers, four heads."""
    small = replace(model.config, num_layers=2, windows=model.config.windows[:2])
    draft, heads = Model.random(small, model.dtype, model.device), Heads.random(model, 4)

    def medusa(spec: SpecConfig) -> Drafter:
        return MedusaDrafter(spec, heads, model)

    parts: dict[str, dict[str, Any]] = {
        "ngram tree": {"tree_width": 4},
        "draft": {
            "method": "draft", "make": lambda spec: ModelDrafter(spec, draft, model.config.vocab_size)
        },
        "medusa": {"method": "medusa", "make": medusa},
        "medusa tree": {"method": "medusa", "tree_width": 4, "make": medusa},
    }  # fmt: skip
    return {
        name: measure(model, f"{shape} {name}", min(args.contexts), machine, args, **options)
        for name, options in parts.items()
    }


def measure(
    model: Model,
    shape: str,
    context: int,
    machine: dict[str, float],
    args: argparse.Namespace,
    **options: Any,
) -> list[dict[str, Any]]:
    """One row per (B, K) at this context."""
    found = []
    for batch in args.batches:
        try:
            engine = make_engine(model, batch, context + 128, max(args.ks), **options)
        except (ValueError, torch.cuda.OutOfMemoryError) as error:
            print(f"{shape} B={batch} context {context}: left out ({str(error).splitlines()[0]})")
            continue
        worker = engine.worker
        graphs = worker.graphs
        assert graphs is not None
        base = 0.0
        for k in [k for k in args.ks if k <= worker.max_k]:
            bucket = Bucket(batch, k)
            graphs.ks = sorted({*graphs.ks, k})
            graphs.capture(bucket)
            ms = replay_ms(graphs, bucket, partial(worker.rehearsal, context=context), args.repeats)
            base = base or ms
            limit = roofline.account(model.config, batch, k, context).bound(roofline.Machine(**machine))
            parts = stage_ms(worker, bucket, context, args.repeats)
            row = {
                "batch": batch, "k": k, "context": context, "ms": round(ms, 4),
                "relative_to_k0": round(ms / base, 4), "roofline_ms": round(limit, 4),
                "share_of_roofline": round(limit / ms, 4),
                "forward_ms": round(parts["forward"], 4), "propose_ms": round(parts["propose"], 4),
                "rest_ms": round(max(ms - parts["forward"] - parts["propose"], 0.0), 4),
            }  # fmt: skip
            print(f"{shape:22} " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            found.append(row)
            del graphs.captures[bucket]
        del engine, worker, graphs
        gc.collect()
    return found


def stage_ms(worker: Worker, bucket: Bucket, context: int, repeats: int) -> dict[str, float]:
    """ms of proposing alone and of the forward pass alone (with laying out), each recorded."""
    graphs, table, k = worker.graphs, worker.table, bucket.k
    assert graphs is not None
    record: Any = type(graphs.captures[bucket])
    times = {}
    for name in ("propose", "forward"):

        def part(rows: torch.Tensor, name: str = name) -> Any:
            if name == "propose":
                drafter = worker.drafter
                return tuple((drafter.propose(table, rows, k) if drafter and k else nothing(rows, 0))[:5])
            batch = lay_out(table, rows, guesses(rows.new_zeros(len(rows), k), torch.full_like(rows, k)))
            return (worker.model.logits(worker.model.forward(batch, worker.kv_cache)),)

        rows = torch.full((bucket.batch,), -1, dtype=torch.int32, device=table.device)
        whole, graphs.captures[bucket] = graphs.captures[bucket], record(part, rows)
        times[name] = replay_ms(graphs, bucket, partial(worker.rehearsal, context=context), repeats)
        graphs.captures[bucket] = whole
    return times


def host_gap(model: Model, args: argparse.Namespace) -> dict[str, float]:
    """How much longer a step of a running engine takes than its replay, at B=1, K=4, 1k context."""
    config = make_engine(model, 1, 2048, 4).config
    engine = Engine(config, SyntheticWorker(0.5, config, model))
    graphs = engine.worker.graphs
    assert graphs is not None
    bucket = graphs.bucket_for(1, 4)
    graphs.capture(bucket)
    replay = replay_ms(graphs, bucket, engine.worker.rehearsal, args.repeats)
    engine.add([i % 32 for i in range(1024)], SamplingParams(temperature=0, max_tokens=900))
    for _ in range(20):
        engine.step()
    walls = []
    for _ in range(10):
        synchronize(model.device)
        start = time.perf_counter()
        for _ in range(20):
            engine.step()
        synchronize(model.device)
        walls.append((time.perf_counter() - start) / 20 * 1e3)
    engine.abort_all()
    step = statistics.median(walls)
    return {
        "replay_ms": round(replay, 4),
        "engine_step_ms": round(step, 4),
        "gap_ms": round(step - replay, 4),
        "gap_share": round(max(step - replay, 0.0) / step, 4),
    }


if __name__ == "__main__":
    main()
