"""What others take for the same work on this GPU, measured beside ours in the same process.

    python bench/peers/gpu.py plain|attention|transformers [--shape qwen3-0.6b] [--out bench/results]

plain: a decode step in plain PyTorch (`bench/plain.py`) at K=0 and K=4, in a CUDA graph, as it is and
through `torch.compile`, in turn with our captured step of the same shape. attention: FlashAttention 3 over
contiguous keys and values, where its wheel is there, in turn with ours over pages. transformers:
`generate` with random weights, plain, with a static cache, and with prompt lookup, in ms per forward pass
(what random weights accept is no result). Who is missing is recorded as missing.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench import events, roofline
from bench.cases import Case, all_cases
from bench.plain import PlainModel
from bench.rows import Rows, release_memory, run
from bench.steps import load_shape, make_engine, step_ms
from nanospec.device.graphs import Bucket
from nanospec.models.config import ModelConfig

Call = Callable[..., Any]

COMPILING = 75.0  # seconds that torch.compile may take for one step, about
FA3 = ("flash_attn_interface", "fa3_fwd_interface")  # built from source; the wheel fa3-fwd


# ---- plain PyTorch -------------------------------------------------------------------------------


def plain(out: Rows, shape: str, repeats: int) -> None:
    context = 64 if out.cpu else 1024
    ours = our_steps(out, shape, context, repeats)
    config = load_shape(shape, out)[1] if shape == "tiny" else roofline.MODELS[shape]
    for batch in (1, 8):
        for k in (0, 4):
            name = f"plain {shape} B={batch} K={k}"
            if out.has_time(name, 8.0):
                with out.attempt(name), torch.no_grad():
                    plain_rows(out, name, config, batch, k, context, repeats, ours.get((batch, k)), shape)
                torch.compiler.reset()
                release_memory()


def plain_rows(
    out: Rows, name: str, config: ModelConfig, batch: int, k: int, context: int, repeats: int,
    known: float | None, shape: str,
) -> None:  # fmt: skip
    """A row for the step as it is and, at B=1, one for the compiled step."""
    model = PlainModel(config, batch, context + 128, out.device, out.dtype)
    ids = torch.randint(0, config.vocab_size, (batch, k + 1), device=out.device)
    positions = torch.arange(context, context + k + 1, device=out.device)
    graphs = {"graph": events.capture([lambda: model.step(ids, positions)], 1)}
    if batch == 1 and out.has_time(f"{name}, compiled", COMPILING):
        with out.attempt(f"{name}, compiled"):
            backend = "eager" if out.cpu else "inductor"
            step = torch.compile(model.step, fullgraph=True, dynamic=False, backend=backend)
            graphs["compiled"] = events.capture([lambda: step(ids, positions)], 1)
    runs = {peer: (graph.replay, calls) for peer, (graph, calls) in graphs.items()}
    for peer, times in events.interleaved(runs, 5 * repeats).items():
        ms = statistics.median(times)
        said = f", ours {known:.3f} ms, {ms / known:.2f}x" if known else ""
        out.add(
            f"{name} {peer}: {ms:.3f} ms{said}", headline=batch == 1, peer=f"torch {peer}", shape=shape,
            batch=batch, k=k, context=context, ms=round(ms, 4), ours_ms=known,
        )  # fmt: skip


def our_steps(out: Rows, shape: str, context: int, repeats: int) -> dict[tuple[int, int], float]:
    """ms of our captured steps, by batch size and K."""
    found: dict[tuple[int, int], float] = {}
    model, _ = load_shape(shape, out)
    for batch in (1, 8):
        with out.attempt(f"our steps {shape} B={batch}"):
            worker = make_engine(model, batch, context + 128, 4).worker
            assert worker.graphs is not None
            worker.graphs.ks = [0, 4]
            for k in (0, 4):
                worker.graphs.capture(Bucket(batch, k))
                found[batch, k] = round(step_ms(worker, Bucket(batch, k), context, 3 * repeats), 4)
            del worker
    del model
    release_memory()
    return found


# ---- FlashAttention 3 ----------------------------------------------------------------------------


def fa3() -> tuple[str, Call] | str:
    """The module and its function for a cache, or why there is none."""
    reasons = []
    for name in FA3:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a library that does not load is no ImportError
            reasons.append(f"{name}: {repr(error).splitlines()[0][:100]}")
            continue
        if function := getattr(module, "flash_attn_with_kvcache", None):
            return name, function
        reasons.append(f"{name} has no flash_attn_with_kvcache")
    return "; ".join(reasons)


def attention(out: Rows, repeats: int) -> None:
    peer = fa3()
    if isinstance(peer, str):
        out.add(f"FA3 is missing: {peer}"[:300], headline=True, missing="FA3", why=peer)
        return
    bandwidth = events.ceilings(out.device)["bandwidth"]
    cases = {case.label: case for case in all_cases() if case.kernel == "attention"}
    sizes = ((1, 1, 1024), (1, 5, 1024), (64, 5, 1024), (1, 5, 16384), (64, 5, 16384), (64, 1, 1024))
    for shape in ("qwen3-0.6b", "qwen3-8b"):
        for size in sizes:
            case = cases.get(f"{shape}-B{size[0]}-q{size[1]}-L{size[2]}")
            if case is not None and out.has_time(f"FA3 {case.label}"):
                with out.attempt(f"FA3 {case.label}"):
                    attention_row(out, case, roofline.MODELS[shape], size, peer, bandwidth, repeats)
                release_memory()


def attention_row(
    out: Rows, case: Case, config: ModelConfig, size: tuple[int, int, int], peer: tuple[str, Call],
    bandwidth: float, repeats: int,
) -> None:  # fmt: skip
    """Ours and the peer's in turn, each over several inputs of its own, so that no cache helps."""
    B, Q, L = size
    sets = max(1, min(16, 1 + (120 << 20) // case.bytes))
    lengths = torch.full((B,), L, dtype=torch.int32, device=out.device)

    def random(count: int, heads: int) -> torch.Tensor:
        return torch.randn(B, count, heads, config.head_dim, device=out.device, dtype=out.dtype)

    def theirs() -> Call:
        q, k, v = random(Q, config.num_heads), random(L, config.num_kv_heads), random(L, config.num_kv_heads)
        return lambda: peer[1](q, k, v, cache_seqlens=lengths, causal=True)

    graphs = {
        "ours": events.capture([case.build(str(out.device)).run for _ in range(sets)]),
        "FA3": events.capture([theirs() for _ in range(sets)]),
    }
    times = events.interleaved({who: (graph.replay, n) for who, (graph, n) in graphs.items()}, repeats)
    us = {who: round(statistics.median(values) * 1e3, 2) for who, values in times.items()}
    said = ", ".join(f"{who} {value} us" for who, value in us.items())
    limit = case.bytes / bandwidth * 1e6
    text = f"attention {case.label}: {said}, limit {limit:.1f}"
    out.add(text, headline=True, case=case.label, peer=peer[0], us=us, limit_us=round(limit, 2))


# ---- transformers --------------------------------------------------------------------------------


def transformers_model(out: Rows, shape: str) -> Any:
    """A model of the shape with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    config = load_shape(shape, out)[1] if shape == "tiny" else roofline.MODELS[shape]
    make = Qwen3Config if config.qk_norm else LlamaConfig
    asked = make(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(out.device):
        return AutoModelForCausalLM.from_config(asked, dtype=out.dtype, attn_implementation="sdpa").eval()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "static cache, compiled": {"cache_implementation": "static"},
}


def generate_ms(out: Rows, model: Any, tokens: int, options: dict[str, Any]) -> tuple[float, int]:
    """ms per forward pass of a generation from a prompt of 1k tokens that repeat, and the passes, which are
    counted where they are not one for each token."""
    passes: list[int] = []
    lookup = "prompt_lookup_num_tokens" in options
    hook = model.register_forward_hook(lambda *_: passes.append(1)) if lookup else None
    length = 64 if out.cpu else 1024
    prompt = (torch.arange(length, device=out.device) % 29)[None]
    try:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, **options,
        )  # fmt: skip
        torch.cuda.synchronize()
        count = len(passes) if lookup else tokens
        return (time.perf_counter() - start) * 1e3 / count, count
    finally:
        if hook is not None:
            hook.remove()


def transformers(out: Rows, shape: str) -> None:
    try:
        model = transformers_model(out, shape)
    except ImportError as error:
        out.add(f"transformers is missing: {error}", headline=True, missing="transformers")
        return
    tokens = 8 if out.cpu else 64
    for way, options in WAYS.items():
        if out.has_time(f"transformers {way}", 60.0 if way.endswith("compiled") else 8.0):
            with out.attempt(f"transformers {way}"), torch.no_grad():
                generate_ms(out, model, tokens, options)
                ms, passes = min(generate_ms(out, model, tokens, options) for _ in range(2))
                text = f"transformers {shape} B=1 {way}: {ms:.2f} ms per pass, {tokens} tokens in {passes}"
                figures = {"shape": shape, "ms": round(ms, 3), "passes": passes, "tokens": tokens}
                out.add(text, headline=True, peer=f"transformers {way}", **figures)


def measure(out: Rows, args: argparse.Namespace) -> None:
    if args.what == "plain":
        plain(out, args.shape, args.repeats)
    elif args.what == "attention":
        attention(out, args.repeats)
    else:
        transformers(out, args.shape)


def main(argv: list[str] | None = None) -> None:
    plain_help = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain_help)
    parser.add_argument("what", choices=["plain", "attention", "transformers"])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=5)
    run("peers", measure, parser, argv)


if __name__ == "__main__":
    main()
