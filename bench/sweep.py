"""Time every tiling of a layer's products on this GPU, and check that all of them have equal bits.

    python bench/sweep.py [--shape qwen3-8b] [--tokens 64 160 320 576 1024 2048] [--out bench/results]

Only the parts of K determine the order of a sum, so `choose_tiling` could choose from a table. Candidates
split K, or not, for any number of tokens. Wide tiles have W1 + W2 tokens, such as 128 + 32 for 64 rows with 4
drafts: two accumulators share a tile of the weight. They are timed without the fused operations and without
adding the parts of K, beside the current product without fused operations (`plain`) and cuBLAS.
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = str(int("--cpu" in sys.argv))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench import common, events, rows
from bench.cases import Call
from bench.cases.layer import MODELS, Shape, normal
from bench.rows import Rows
from nanospec.kernels.launch import Gpu, forced, gpu_of
from nanospec.kernels.layer import product
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.layer.residual import Norm, embed
from nanospec.kernels.layer.tiling import Tiling, choose_tiling, split_k_parts

SHAPES = {shape.name: shape for shape in (*MODELS, Shape("tiny", 64, 1152, 1, 1, 64, 64))}
# Rows of the weight, and tokens
TILES = [*itertools.product((64, 128), (32, 64, 128, 256)), (256, 64), (256, 128)]
WIDE = [(128, 128, 32), (128, 128, 64), (128, 256, 64), (256, 128, 32)]  # rows of the weight, W1, W2
Ways = dict[str, list[Call]]  # calls with different inputs, by what is timed


def candidates(T: int, N: int, K: int, gpu: Gpu) -> Iterator[Tiling]:
    """Yield tilings for x [T, K] and a weight [N, K] in 16 bits."""
    parts, part = split_k_parts(N, K, gpu)
    options = itertools.product(TILES, (64, 128), (False, True), (1, 2, 3))
    for (height, width), step, split_k, together in options:
        stages = gpu.stages((height + width) * 2 * step, 6, together)
        values = height * width * (1 if split_k or parts == 1 else 2)  # of the accumulators
        if split_k <= (parts > 1) and part % step == 0 and width <= max(2 * T, 32) and values <= 1 << 15:
            warps = 8 if height * width >= 8192 else 4
            yield Tiling(height, width, step, warps, max(stages, 2), parts, part, split_k)


@triton.jit
def _wide(x, w, out, T, N, K, steps, HEIGHT: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums of a part of K to out [parts, T, N]. Grid: (tiles of W1 + W2 tokens, blocks, parts)."""
    index, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, k = block * HEIGHT + tl.arange(0, HEIGHT)[:, None], tl.arange(0, 64)[None, :]
    t1 = index * (W1 + W2) + tl.arange(0, W1)[:, None]
    t2 = index * (W1 + W2) + W1 + tl.arange(0, W2)[:, None]
    acc1, acc2 = tl.zeros([HEIGHT, W1], tl.float32), tl.zeros([HEIGHT, W2], tl.float32)
    for step in range(part * steps, tl.minimum((part + 1) * steps, K // 64)):
        at = step * 64 + k
        tile = tl.load(w + row.to(tl.int64) * K + at, row < N, other=0.0)
        first = tl.load(x + t1.to(tl.int64) * K + at, t1 < T, other=0.0)
        second = tl.load(x + t2.to(tl.int64) * K + at, t2 < T, other=0.0)
        acc1 = tl.dot(tile, tl.trans(first), acc1, input_precision="ieee")
        acc2 = tl.dot(tile, tl.trans(second), acc2, input_precision="ieee")
    out += part.to(tl.int64) * T * N + row
    tl.store(out + tl.trans(t1).to(tl.int64) * N, acc1, (row < N) & (tl.trans(t1) < T))
    tl.store(out + tl.trans(t2).to(tl.int64) * N, acc2, (row < N) & (tl.trans(t2) < T))


def wide(x: Tensor, w: Tensor, tile: tuple[int, int, int], together: int) -> Tensor:
    """Return the sums [parts, T, N] of the parts of x @ w.T by a tile of `WIDE`."""
    (T, K), N, gpu = x.shape, w.shape[0], gpu_of(x)
    parts, part = split_k_parts(N, K, gpu)
    out = torch.empty(parts, T, N, dtype=torch.float32, device=x.device)
    stages = max(gpu.stages(sum(tile) * x.itemsize * 64, 6, together), 2)
    grid = triton.cdiv(T, sum(tile[1:])), triton.cdiv(N, tile[0]), parts
    _wide[grid](x, w, out, T, N, K, part // 64, *tile, num_warps=8, num_stages=stages)
    return out


def tiled(run: Call, tiling: Tiling) -> object:
    """Call `run` with a tiling."""
    product.choose_tiling = lambda *_: tiling  # type: ignore[assignment]
    try:
        return run()
    finally:
        product.choose_tiling = choose_tiling


def inputs(fused: str, T: int, N: int, K: int, device: str) -> tuple[Call, Call, Tensor, Tensor]:
    """Return a fused product, the plain one, and their inputs x [T, K] and w [N, K]."""
    random = partial(normal, device, dtype=torch.float16 if device == "cpu" else torch.bfloat16)
    x, w, H = random(T, K), random(N, K), N if fused == "add" else K
    stream = embed(torch.arange(T, device=device), random(T, H), Norm(random(H), 1e-6))
    layer = make_linear(w)
    calls: dict[str, Call] = {
        "norm": lambda: layer.after_norm(stream),
        "gate": lambda: layer.gated(stream),
        "add": lambda: layer.add_to(stream, x, stream.norm),
    }
    return calls[fused], lambda: layer(x), x, w


def ways_of(fused: str, T: int, N: int, K: int, device: str, sets: int) -> tuple[Ways, Ways]:
    """Return the ways to compute a fused product and the plain one, each with the current way first."""
    # Enough for a candidate with split K and any number of tokens.
    product.new_counters = lambda w: torch.zeros(1 << 16, dtype=torch.int32, device=w.device)  # type: ignore[assignment]
    built = [inputs(fused, T, N, K, device) for _ in range(sets)]
    ways: Ways = {"current": [call for call, *_ in built]}
    every = 15 if device == "cpu" else 1  # fewer in a dry run
    for tiling in [*candidates(T, N, K, gpu_of(built[0][2]))][::every]:
        ways[str(tuple(tiling))] = [partial(tiled, call, tiling) for call, *_ in built]
    plain: Ways = {"current": [call for _, call, *_ in built]}
    for tile, together in [*itertools.product(WIDE, (1, 2))][::every]:
        if sum(tile[1:]) < 2 * T:
            plain[f"{tile} x {together}"] = [partial(wide, x, w, tile, together) for *_, x, w in built]
    plain["cublas"] = [partial(torch.matmul, x, w.T) for *_, x, w in built]
    return ways, plain


def output(call: Call, dtype: torch.dtype | None = None) -> Tensor:
    """Return the output of a call, adding the parts of `wide` in order and rounding to `dtype`."""
    result: Any = call()
    if not isinstance(result, Tensor):
        return result.x
    return sum(result, torch.zeros_like(result[0])).to(dtype) if result.dim() == 3 else result


def compare(out: Rows, what: str, ways: Ways, repeats: int) -> None:
    """Time all ways in turn, compare their outputs with those of the first, and write a row for each."""
    expected, same, graphs = output(ways["current"][0]), dict[str, bool](), dict[str, tuple[Call, int]]()
    for name, calls in ways.items():
        with out.attempt(f"{what} {name}"):
            same[name] = torch.equal(output(calls[0], expected.dtype), expected)
            graphs[name] = events.capture(calls)
    us = {name: 1e3 * statistics.median(ms) for name, ms in events.interleaved(graphs, repeats).items()}
    for name in us:
        wrong = not same[name] and name != "cublas"
        out.failed += wrong and not out.cpu  # the interpreter's sums depend on the tile
        text = f"{'OTHER BITS ' if wrong else ''}{what} {name}: {us[name]:.2f} us"
        out.add(text, headline=wrong, case=what, way=name, us=round(us[name], 2), same=same[name])
    best = min((name for name in us if name != "cublas"), key=us.__getitem__)
    text = f"{what}: current {us['current']:.2f} us, best {us[best]:.2f} with {best}"
    out.add(text, headline=True, case=what, best=best, us=us[best], current=us["current"])


def compile_all(job: tuple[str, int, int, int]) -> None:
    """Run each way once, in one of several processes, which fills Triton's cache."""
    for ways in ways_of(*job, "cuda", 1):
        for calls in ways.values():
            with suppress(Exception):  # reported when it is timed
                calls[0]()


def measure(out: Rows, args: argparse.Namespace) -> None:
    s, device = SHAPES[args.shape], str(out.device)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    weights = {
        "qkv": ("norm", q + 2 * kv, s.hidden), "o": ("add", s.hidden, q),
        "gate_up": ("gate", 2 * s.intermediate, s.hidden), "down": ("add", s.hidden, s.intermediate),
    }  # fmt: skip
    jobs = {
        f"{s.name}-{name}-T{T}": (fused, T, N, K)
        for T in args.tokens
        for name, (fused, N, K) in weights.items()
    }
    if not out.cpu:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), get_context("spawn")) as pool:
            list(pool.map(compile_all, jobs.values()))
    for what, job in jobs.items():
        if out.begins(what, 10.0):
            cache = 0 if out.cpu else torch.cuda.get_device_properties(0).L2_cache_size
            with out.attempt(what), forced("triton"):
                for kind, ways in zip(
                    ("", " plain"), ways_of(*job, device, 1 + cache // (job[2] * job[3])), strict=True
                ):
                    compare(out, what + kind, ways, args.repeats)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 160, 320, 576, 1024, 2048])
    rows.run("sweep", measure, parser, argv)


if __name__ == "__main__":
    main()
