"""Time whole captured steps by batch size and K, as share of the roofline, on random weights.

    python bench/steps.py [--shape qwen3-0.6b] [--contexts 1024 8192] [--batches 1 8 64] [--ks 0 4]
                          [--drafters] [--besides] [--out bench/results]

Shapes are those of real models, weights are random and made on the device: a step's time does not
depend on what the weights are. Every row drafts K tokens (periodic text), so all work is done, and looks
them up as requests do by default. Per bucket: ms of a replay by device events (median), ms of proposing
and of the forward pass captured alone, and the roofline at the measured copy bandwidth and matrix rate
(`bench/roofline.py`). `--drafters`: the same with other drafters than n-gram lookup. `--besides`: only
what the file of results does not have yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import events, roofline, rows, tiny
from bench.rows import TARGETS, Rows
from nanospec import SpecConfig
from nanospec.config import EngineConfig
from nanospec.device.graphs import Bucket
from nanospec.device.timing import replay_ms
from nanospec.device.worker import Worker
from nanospec.drafters.base import Drafter, guesses
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.medusa import MedusaDrafter
from nanospec.drafters.ngram import NgramDrafter
from nanospec.engine.engine import Engine
from nanospec.kernels.speculation.layout import lay_out
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.models.heads import Heads
from nanospec.models.random_weights import random_model

Make = Callable[[SpecConfig], Drafter]
ROOM = 128  # tokens of a window beyond the context
SLOWEST = 8.0  # seconds that a bucket takes at most, about


def load_shape(shape: str, out: Rows) -> tuple[Model, ModelConfig]:
    """A model of a named shape with random weights, "tiny" for dry runs."""
    config = ModelConfig.from_dict(tiny.SHAPE) if shape == "tiny" else roofline.MODELS[shape]
    return random_model(config, out.dtype, out.device), config


def make_engine(
    model: Model, batch: int, window: int, k: int, make: Make | None = None, **guess: Any
) -> Engine:
    """An engine without captures, with room for `batch` rows of `window` tokens. `make`: makes the
    drafter; None for n-gram lookup. `guess`: fields of `SpecConfig`."""
    spec = SpecConfig(num_speculative_tokens=k, **guess)
    drafter = make(spec) if make is not None else NgramDrafter(spec)
    config = make_config(model, batch, window, spec, drafter.kv_bytes_per_token)
    worker = Worker(config, model, drafter)
    worker.kv_cache.normal_()  # zeros take less power, and so less time
    return Engine(config, worker)


def make_config(
    model: Model, batch: int, window: int, spec: SpecConfig, drafter_bytes: int = 0
) -> EngineConfig:
    """Room for `batch` rows of `window` tokens; steps are captured when they are needed."""
    per_token = model.config.kv_bytes_per_token(model.dtype) + drafter_bytes
    return EngineConfig(
        spec=spec,
        max_num_seqs=batch,
        max_model_len=window,
        kv_cache_memory=(batch * -(-window // 16) + 1) * 16 * per_token,
        enforce_eager=False,
        lazy_capture=True,
    )


@contextmanager
def rehearsal(worker: Worker, count: int, context: int) -> Iterator[None]:
    """The worker's, at this context whatever its window, with the lookup lengths of its requests."""
    with worker.rehearsal(count, context=context):
        table, spec, filled = worker.table, worker.config.spec, slice(0, count)
        table.num_tokens[filled] = context
        table.min_n[filled], table.max_n[filled] = spec.prompt_lookup_min, spec.prompt_lookup_max
        yield


def step_ms(worker: Worker, bucket: Bucket, context: int, repeats: int) -> float:
    """ms of a replay of a captured step."""
    assert worker.graphs is not None
    return replay_ms(worker.graphs, bucket, partial(rehearsal, worker, context=context), repeats)


def by_drafter(model: Model) -> dict[str, dict[str, Any]]:
    """Options of `make_engine` for other drafters: trees, a draft model of two of the target's layers, four
    heads."""
    small = replace(model.config, num_layers=2, windows=model.config.windows[:2])
    draft, heads = random_model(small, model.dtype, model.device), Heads.random(model, 4)

    def medusa(spec: SpecConfig) -> Drafter:
        return MedusaDrafter(spec, heads, model)

    def drafting(spec: SpecConfig) -> Drafter:
        return ModelDrafter(spec, draft, model.config.vocab_size)

    return {
        "draft": {"method": "draft", "make": drafting},
        "medusa": {"method": "medusa", "make": medusa},
        "ngram tree": {"tree_width": 4},
        "medusa tree": {"method": "medusa", "tree_width": 4, "make": medusa},
    }


def measure_shape(
    out: Rows, model: Model, shape: str, context: int, machine: roofline.Machine, args: argparse.Namespace,
    drafter: str = "ngram", **options: Any,
) -> None:  # fmt: skip
    """One row per (B, K) at this context."""
    known = rows.read(out.path) if args.besides else []
    have = {(r.get("shape"), r.get("drafter"), r.get("context"), r.get("batch"), r.get("k")) for r in known}
    for batch in args.batches:
        ks = [k for k in args.ks if (shape, drafter, context, batch, k) not in have]
        what = f"{shape} {drafter} B={batch} context {context}"
        if not ks or not out.has_time(what, SLOWEST):
            continue

        def one(k: int, worker: Worker, batch: int = batch) -> None:
            bucket_row(out, worker, Bucket(batch, k), context, shape, drafter, machine, args)

        with out.attempt(what):
            all_ks(
                out, make_engine(model, batch, context + ROOM, max(args.ks), **options).worker, ks, one, what
            )
        rows.release_memory()


def all_ks(out: Rows, worker: Worker, ks: list[int], one: Callable[[int, Worker], None], what: str) -> None:
    """Each K in turn: what one breaks, the others need not suffer."""
    for k in [k for k in ks if k <= worker.max_k]:
        if out.has_time(f"{what} K={k}"):
            with out.attempt(f"{what} K={k}"):
                one(k, worker)


def bucket_row(
    out: Rows, worker: Worker, bucket: Bucket, context: int, shape: str, drafter: str,
    machine: roofline.Machine, args: argparse.Namespace,
) -> None:  # fmt: skip
    """Capture a bucket, time it and its parts, and drop it."""
    graphs, (batch, k) = worker.graphs, bucket
    assert graphs is not None
    graphs.ks = sorted({*graphs.ks, k})
    if k not in graphs.ks_for(batch):
        out.add(f"{shape} B={batch} K={k}: the engine captures no such step", batch=batch, k=k)
        return
    graphs.capture(bucket)
    ms = step_ms(worker, bucket, context, args.repeats)
    limit = roofline.account(worker.model.config, batch, k, context).bound(machine)
    base = args.base.setdefault((shape, drafter, context, batch), ms if k == 0 else 0.0)
    row: dict[str, Any] = {
        "shape": shape, "drafter": drafter, "batch": batch, "k": k, "context": context,
        "ms": round(ms, 4), "limit_ms": round(limit, 4), "share": round(limit / ms, 4),
        "ratio": round(ms / base, 4) if base else None,
    }  # fmt: skip
    text = f"{shape:13}{drafter:12}B={batch:<3} K={k:<3}{context:6} tokens {ms:8.3f} ms"
    text += f" {limit / ms:6.1%} of the limit"
    text += f"  t(K)/t(0) {row['ratio']:.3f}" if base else ""
    try:
        parts = stage_ms(worker, bucket, context, args.repeats)
    except Exception as error:  # the whole is known all the same
        row["parts_error"] = repr(error)[:300]
    else:
        row |= {f"{name}_ms": round(value, 4) for name, value in parts.items()}
        besides = max(1 - parts["forward"] / ms, 0.0)
        row["besides_the_model"] = round(besides, 4)
        text += f"  besides the model {besides:.1%} (propose {parts['propose'] * 1e3:.0f} us)"
    target = f"{shape} B={batch} K={k}" if (batch, k) != (1, 0) else shape
    if context == 1024 and drafter == "ngram" and target in TARGETS:
        text += f"  {TARGETS[target].judge(ms)}"
    out.add(text, headline=batch in (1, 64) and k in (0, 4), **row)
    graphs.captures.pop(bucket, None)


def stage_ms(worker: Worker, bucket: Bucket, context: int, repeats: int) -> dict[str, float]:
    """ms of proposing alone and of laying out with the forward pass, each captured in the step's place.
    What they are given is made beforehand."""
    graphs, table, (batch, k) = worker.graphs, worker.table, bucket
    assert graphs is not None
    ids = torch.arange(batch, dtype=torch.int32, device=table.device)
    given = guesses(ids.new_zeros(batch, k), torch.full_like(ids, k))

    def propose(rows: torch.Tensor, k: int) -> Any:
        assert worker.drafter is not None
        return tuple(worker.drafter.propose(table, rows, k)[:5])

    def forward(rows: torch.Tensor, k: int) -> Any:
        return (worker.model.logits(worker.model.forward(lay_out(table, rows, given), worker.kv_cache)),)

    whole: Any = graphs.step
    times = {"propose": 0.0}
    try:
        for name, part in (("propose", propose), ("forward", forward)):
            if name == "forward" or k:
                graphs.step = torch.inference_mode()(part)
                graphs.capture(bucket)
                times[name] = step_ms(worker, bucket, context, repeats)
    finally:
        graphs.step = whole
    return times


def measure(out: Rows, args: argparse.Namespace) -> None:
    model, _ = load_shape(args.shape, out)
    machine = roofline.Machine(**events.ceilings(out.device))
    args.base = {}
    drafters = by_drafter(model) if args.drafters else {"ngram": {}}
    for name, options in drafters.items():
        for context in args.contexts:
            measure_shape(out, model, args.shape, context, machine, args, name, **options)


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*roofline.MODELS, "tiny"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--ks", nargs="+", type=int, default=[0, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--drafters", action="store_true")
    parser.add_argument("--besides", action="store_true")
    rows.run("steps", measure, parser, argv)


if __name__ == "__main__":
    main()
