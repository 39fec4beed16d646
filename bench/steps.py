"""Time whole captured steps by batch size and K against the roofline.

    python bench/steps.py [--shape qwen3-0.6b] [--contexts 1024 8192] [--batches 1 8 64] [--ks 0 2 4 8]
                          [--drafter eagle3] [--out bench/results]

Models have real shapes and random weights, which do not affect the time of a step. Every row has a periodic
text, for which lookup proposes K drafts; EAGLE-3 and DFlash draft from random weights too, over the
`DRAFTED` most frequent tokens. The modes are `graph` (captured) and `graph, no PDL` (captured without
programmatic dependent launch). Times are medians of device events; the limit is that of `bench/roofline.py`
at the measured bandwidth and FLOP rate.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common, events, roofline, rows
from bench.rows import Rows
from nanospec import SpecConfig
from nanospec.config import EngineConfig
from nanospec.device import timing
from nanospec.device.graphs import Bucket
from nanospec.device.worker import Worker
from nanospec.drafters import Drafter
from nanospec.drafters.eagle3 import Eagle3Drafter
from nanospec.drafters.ngram import NgramDrafter
from nanospec.models.decoder import Model
from nanospec.models.families import config_of
from tests.random_weights import hidden_state_drafter, random_model

MODES = ("graph", "graph, no PDL")
ROOM = 128  # tokens of max_model_len after the context
STEP_BYTES = 1 << 30  # reserved for the steps and request rows of an engine
SLOWEST = 8.0  # seconds reserved to capture and time the steps of a batch size
DRAFTED = 32000
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def load_shape(shape: str, out: Rows) -> Model:
    """Return a model of a named shape ("tiny" for dry runs) with random weights."""
    config = config_of(TINY) if shape == "tiny" else roofline.MODELS[shape]
    return random_model(config, out.dtype, out.device)


def cache_bytes(model: Model, batch: int, window: int) -> int:
    """Return the bytes of K/V of `batch` rows of `window` tokens and a spare one."""
    return (batch + 1) * -(-window // 16) * 16 * model.config.kv_bytes_per_token(model.dtype)


def engine_config(
    model: Model, batch: int, window: int, k: int | str, lazy: bool = True, method: str = "ngram"
) -> EngineConfig:
    """Return a config whose KV cache fits `batch` rows of `window` tokens."""
    spec = SpecConfig(method, num_speculative_tokens=k)  # type: ignore[arg-type]
    memory = cache_bytes(model, batch, window)
    return EngineConfig(
        spec=spec, max_num_seqs=batch, max_model_len=window, kv_cache_memory=memory,
        enable_prefix_caching=False, enforce_eager=False, lazy_capture=lazy,
    )  # fmt: skip


@contextmanager
def dummy_rows(worker: Worker, count: int, context: int) -> Iterator[None]:
    """Fill rows with `context` tokens and the default n-gram lengths, in the context."""
    with timing.dummy_rows(worker.table, worker.num_blocks, count, context):
        table, spec = worker.table, worker.config.spec
        table.num_tokens[:count] = context
        table.min_n[:count], table.max_n[:count] = spec.prompt_lookup_min, spec.prompt_lookup_max
        for drafter in worker.drafters:
            if isinstance(drafter, Eagle3Drafter):
                drafter.entry[:count] = context - 2  # all hidden states have been read
        yield


def create_drafter(model: Model, spec: SpecConfig) -> Drafter:
    """Return the drafter of `spec`, n-gram lookup or one of random weights that reads three layers."""
    if spec.method == "ngram":
        return NgramDrafter(spec)
    n = model.config.num_layers
    vocab = min(DRAFTED, model.config.vocab_size) if spec.method == "eagle3" else None
    return hidden_state_drafter(spec.method, model, spec, vocab=vocab, reads=(min(2, n), n // 2, n - 1))


def measure(out: Rows, args: argparse.Namespace) -> None:
    model, machine = load_shape(args.shape, out), roofline.Machine(**events.limits(out.device))
    out.add(f"copy {machine.bandwidth / 1e12:.2f} TB/s, matmul {machine.flops / 1e12:.0f} TFLOP/s", True)
    for context in args.contexts:
        for batch in args.batches:
            what = f"{args.shape} B={batch}, {context} tokens"
            needed = cache_bytes(model, batch, context + ROOM) + STEP_BYTES
            if out.fits(what, needed) and out.begins(what, SLOWEST):
                with out.attempt(what):
                    one_batch(out, model, args, batch, context, machine)


def one_batch(
    out: Rows, model: Model, args: argparse.Namespace, batch: int, context: int, machine: roofline.Machine
) -> None:
    """Write a row for each K and mode."""
    config = engine_config(model, batch, context + ROOM, max(args.ks), method=args.drafter)
    worker = Worker(config, model, [create_drafter(model, config.spec)])
    worker.kv_cache.normal_()  # zeros would need less power and run faster
    graphs, base = worker.graphs, dict[str, float]()
    assert graphs is not None
    for k in (k for k in args.ks if k in graphs.ks_for(batch) or k < worker.max_k):
        bucket = Bucket(batch, k)
        limit = roofline.account(model.config, batch, k, context).bound(machine)
        for mode in MODES:
            name = args.shape if args.drafter == "ngram" else f"{args.shape} {args.drafter}"
            what = f"{name:13} B={batch:<3} K={k:<3}{context:6} tokens {mode:14}"
            with out.attempt(what):
                os.environ["NANOSPEC_PDL"] = str(int(mode != "graph, no PDL"))
                graphs.capture(bucket)
                fill_rows = partial(dummy_rows, worker, context=context)
                ms = timing.replay_ms(graphs, bucket, fill_rows, repeats=args.repeats)
                ratio = ms / base.setdefault(mode, ms)
                figures = {"ms": round(ms, 4), "limit_ms": round(limit, 4), "ratio": round(ratio, 4)}
                text = f"{what}{ms:9.3f} ms, {limit / ms:6.1%} of the limit, {ratio:.3f} of K={args.ks[0]}"
                out.add(
                    text, headline=mode == "graph", shape=args.shape, batch=batch, k=k, context=context,
                    mode=mode, drafter=args.drafter, share=round(limit / ms, 4), **figures,
                )  # fmt: skip
            graphs.captures.pop(bucket, None)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, repeats=10)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*roofline.MODELS, "tiny"])
    parser.add_argument("--drafter", default="ngram", choices=["ngram", "eagle3", "dflash"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--ks", nargs="+", type=int, default=[0, 2, 4, 8])
    rows.run("steps", measure, parser, argv)


if __name__ == "__main__":
    main()
