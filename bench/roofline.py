"""Why guessing tokens pays, before anything is measured: bytes, FLOPs and launches of a step.

    python bench/roofline.py [--model qwen3-8b] [--config PATH] [--context 1024] [--out bench/results]

A step scores T = B (K + 1) tokens for B requests with K drafts each. Its parts (the decoder's matrix
products, attention, head, sampling, what surrounds them) follow each other, and each takes at least

    max(bytes / bandwidth, FLOPs / rate)

Bytes are the weights once, the K/V of each request once for all its K + 1 queries, and what the
products read and write for every token: input, residual, output (gate and up count as two), new K/V,
logits. The sum over the parts is the *bound*. Besides, a kernel in a CUDA graph has to start and to
drain, measured as 1.3 us: the *estimate* adds that for every launch, as none of our kernels starts
before the one it depends on has ended.

t(K) / t(0) is how many tokens a step must emit for K drafts to break even. With each draft accepted
with probability a (given those before it) a step emits (1 - a^(K+1)) / (1 - a).

The defaults are those of an H200: 4.3e12 B/s copied, 790e12 FLOP/s in bf16, both measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec.model_config import ModelConfig, read_json

BATCHES = (1, 8, 64, 256)
DRAFTS = (0, 2, 4, 8)
ACCEPTANCES = (0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Machine:
    """What bounds a step.

    Attributes:
        bandwidth: bytes per second that memory delivers.
        flops: FLOPs per second of matrix products in the model's dtype.
        launch: seconds that a kernel inside a CUDA graph costs besides its work.
    """

    bandwidth: float = 4.3e12
    flops: float = 790e12
    launch: float = 1.3e-6

    @property
    def ridge(self) -> float:
        """Tokens per step at which a product with bf16 weights costs as much to compute as to read."""
        return self.flops / self.bandwidth

    def ms(self, moved: int, computed: int) -> float:
        """Least ms to move so many bytes and to compute so many FLOPs."""
        return 1e3 * max(moved / self.bandwidth, computed / self.flops)


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step.

    Attributes:
        part: what it belongs to; within a part, reading and computing may overlap.
        bytes, flops: what all launches have to move and compute together.
    """

    name: str
    part: str
    launches: int
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Step:
    """One speculative step: B requests, K drafts each, `context` cached tokens per request."""

    B: int
    K: int
    context: int
    kernels: tuple[Kernel, ...]

    @property
    def tokens(self) -> int:
        return self.B * (self.K + 1)

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def parts(self, machine: Machine) -> dict[str, float]:
        """Least ms of each part, if launches were free."""
        work: dict[str, tuple[int, int]] = {}
        for kernel in self.kernels:
            moved, computed = work.get(kernel.part, (0, 0))
            work[kernel.part] = (moved + kernel.bytes, computed + kernel.flops)
        return {part: machine.ms(moved, computed) for part, (moved, computed) in work.items()}

    def bound(self, machine: Machine) -> float:
        """Least ms, if launches were free."""
        return sum(self.parts(machine).values())

    def estimate(self, machine: Machine) -> float:
        """ms with the launches, everything else at full rate."""
        return self.bound(machine) + 1e3 * self.launches * machine.launch


def account(config: ModelConfig, B: int, K: int, context: int = 1024, itemsize: int = 2) -> Step:
    """Count a step of the engine's kernels; `itemsize` is bytes per weight, activation and logit."""
    T, L, V = B * (K + 1), config.num_layers, config.vocab_size
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    seen = sum(min(context, window or context) for window in config.windows)  # K/V rows, over layers

    def product(name: str, rows: int, columns: int, residual: int = 0) -> Kernel:
        """[T, columns] x [rows, columns] -> [T, rows] in each layer."""
        moved = rows * columns + T * (columns + rows + residual)
        return Kernel(name, "products", L, itemsize * L * moved, 2 * T * L * rows * columns)

    kernels = (
        Kernel("propose", "propose", 2 if K else 0, 4 * B * context if K else 0),
        Kernel("layout, embedding", "embedding", 2, itemsize * T * H),
        product("norm_linear qkv", q + 2 * kv, H),
        Kernel("rope_cache", "products", L, itemsize * T * L * 2 * kv),
        Kernel("attention", "attention", 2 * L, itemsize * B * seen * 2 * kv, 4 * T * seen * q),
        product("linear_add o", H, q, residual=H),
        product("norm_swiglu", 2 * I, H),
        product("linear_add down", H, I, residual=H),
        Kernel("final norm", "head", 1),
        Kernel("head", "head", 1, itemsize * (H * V + T * V), 2 * T * H * V),
        Kernel("sample", "sample", 2, itemsize * T * V),
        Kernel("verify and commit", "commit", 1),
    )
    return Step(B, K, context, kernels)


def break_even(config: ModelConfig, B: int, K: int, context: int, machine: Machine) -> float:
    """t(K) / t(0): tokens per step at which K drafts cost nothing and gain nothing."""
    return account(config, B, K, context).bound(machine) / account(config, B, 0, context).bound(machine)


def expected_tokens(acceptance: float, K: int) -> float:
    """Tokens a step emits when each draft is accepted with this probability, given those before it."""
    return sum(acceptance**j for j in range(K + 1))


def speedup(config: ModelConfig, B: int, K: int, context: int, machine: Machine, acceptance: float) -> float:
    """Tokens per second with K drafts over tokens per second without."""
    return expected_tokens(acceptance, K) / break_even(config, B, K, context, machine)


# ---- models ------------------------------------------------------------------------------------


def _shape(
    architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int,
    vocab: int, tied: bool,
) -> ModelConfig:  # fmt: skip
    return ModelConfig.from_dict(
        {
            "architectures": [architecture],
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "dtype": "bfloat16",
        }
    )


MODELS = {
    "smollm2-135m": _shape("LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49152, True),
    "qwen3-0.6b": _shape("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "llama-3.2-1b": _shape("LlamaForCausalLM", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "qwen3-8b": _shape("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 128, 151936, False),
}


def load_model(path: Path) -> ModelConfig:
    """The shape in a config.json, or in a folder that holds one."""
    return ModelConfig.from_path(path) if path.is_dir() else ModelConfig.from_dict(read_json(path))


# ---- what is shown -----------------------------------------------------------------------------


def explain(config: ModelConfig, machine: Machine, context: int, B: int = 1, K: int = 4) -> str:
    """Where the time of a step goes without drafts and with K, and what it takes to break even."""
    plain, spec = account(config, B, 0, context), account(config, B, K, context)
    columns = ("K=0: MB", "GFLOP", "us", f"K={K}: MB", "GFLOP", "us", "launches")
    lines = [" " * 20 + "".join(f"{name:>11}" for name in columns)]
    for a, b in zip(plain.kernels, spec.kernels):
        lines.append(
            f"{b.name:20}{a.bytes / 1e6:11.1f}{a.flops / 1e9:11.2f}{1e3 * machine.ms(a.bytes, a.flops):11.1f}"
            f"{b.bytes / 1e6:11.1f}{b.flops / 1e9:11.2f}{1e3 * machine.ms(b.bytes, b.flops):11.1f}"
            f"{b.launches:11}"
        )
    for name, step in (("without drafts", plain), (f"with {K} drafts", spec)):
        lines.append(
            f"{name}: {step.bound(machine):.3f} ms at least, {step.estimate(machine):.3f} with the starts of "
            f"{step.launches} kernels; {step.intensity:.1f} FLOPs per byte (ridge: {machine.ridge:.0f})"
        )
    ratio = break_even(config, B, K, context, machine)
    gains = ", ".join(f"{a:.0%}: {expected_tokens(a, K) / ratio:.2f}x" for a in ACCEPTANCES)
    lines.append(f"{K} drafts break even at {ratio:.2f} tokens per step; speed-up by acceptance: {gains}")
    return "\n".join(lines)


def table(
    config: ModelConfig, machine: Machine, context: int, batches: Iterable[int], drafts: Sequence[int]
) -> list[dict[str, Any]]:
    """Every figure of every (B, K), one dict each."""
    rows = []
    for B in batches:
        for K in drafts:
            step = account(config, B, K, context)
            ratio = break_even(config, B, K, context, machine)
            rows.append(
                {
                    "B": B,
                    "K": K,
                    "bytes": step.bytes,
                    "flops": step.flops,
                    "intensity": round(step.intensity, 2),
                    "launches": step.launches,
                    "bound_ms": round(step.bound(machine), 4),
                    "estimate_ms": round(step.estimate(machine), 4),
                    "break_even_tokens": round(ratio, 4),
                    "speedup": {str(a): round(expected_tokens(a, K) / ratio, 2) for a in ACCEPTANCES},
                }
            )
    return rows


def show(name: str, rows: list[dict[str, Any]], drafts: Sequence[int]) -> None:
    """The table of PERFORMANCE: ms and, in brackets, break-even tokens; below, ms with launches."""
    print(f"\n{name}: least ms per step (tokens per step to break even) / with launches")
    print("     B" + "".join(f"{f'K={K}':>24}" for K in drafts))
    for B in dict.fromkeys(row["B"] for row in rows):
        cells = [
            f"{row['bound_ms']:.3f} ({row['break_even_tokens']:.2f}) / {row['estimate_ms']:.3f}"
            for row in rows
            if row["B"] == B
        ]
        print(f"{B:6}" + "".join(f"{cell:>24}" for cell in cells))


def plot(models: dict[str, ModelConfig], machine: Machine, context: int, path: Path) -> None:
    """Left: what drafts cost over the batch size. Right: what they bring over K, at three batch sizes."""
    plt = common.pyplot()
    figure, axes = plt.subplots(len(models), 2, figsize=(10, 3.4 * len(models)), squeeze=False)
    batches = sorted({round(2 ** (i / 4)) for i in range(37)})
    ks = range(17)
    for (name, config), (left, right) in zip(models.items(), axes):
        for K, color in zip((1, 2, 4, 8, 16), plt.cm.viridis([0.0, 0.22, 0.45, 0.7, 0.9])):
            ratio = [break_even(config, B, K, context, machine) for B in batches]
            left.plot(batches, ratio, color=color, label=f"K={K}")
            ridge = machine.ridge / (K + 1)
            left.plot(ridge, break_even(config, max(round(ridge), 1), K, context, machine), "^", color=color)
        left.set(xscale="log", yscale="log", xlabel="batch size", ylabel="t(K) / t(0)")
        left.set_title(f"{name}: cost of K drafts (▲ ridge, {machine.ridge:.0f} tokens)", fontsize=10)
        left.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        left.set_yticks([1, 1.5, 2, 3, 5, 8], ["1", "1.5", "2", "3", "5", "8"])
        left.minorticks_off()
        left.legend(fontsize=8)
        for a, color in zip(ACCEPTANCES, plt.cm.plasma([0.05, 0.3, 0.55, 0.8])):
            for B, style in ((1, "-"), (64, "--"), (256, ":")):
                gains = [speedup(config, B, K, context, machine, a) for K in ks]
                label = f"acceptance {a:.0%}" if B == 1 else None
                right.plot(ks, gains, style, color=color, label=label)
        right.axhline(1, color="grey", lw=0.8)
        right.set(xlabel="drafts per step K", ylabel="speed-up over K = 0", ylim=(0, None))
        right.set_title(f"{name}: B = 1 (solid), 64 (dashed), 256 (dotted)", fontsize=10)
        right.legend(fontsize=8)
    figure.suptitle(
        f"Bound by bytes and FLOPs: {machine.bandwidth / 1e12:.1f} TB/s, {machine.flops / 1e12:.0f} TFLOP/s, "
        f"context {context}",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=75)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all of them")
    parser.add_argument("--config", type=Path, help="a model's config.json, or its folder")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens per request")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS)
    parser.add_argument("--bandwidth", type=float, default=Machine.bandwidth, help="bytes/s")
    parser.add_argument("--flops", type=float, default=Machine.flops, help="FLOP/s")
    parser.add_argument("--launch-us", type=float, default=Machine.launch * 1e6, help="per kernel")
    parser.add_argument("--plot", action="store_true", help="also draw roofline.png (needs matplotlib)")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)

    machine = Machine(args.bandwidth, args.flops, args.launch_us * 1e-6)
    models = {name: MODELS[name] for name in args.model or ([] if args.config else MODELS)}
    if args.config:
        models[str(args.config)] = load_model(args.config)
    tables = {}
    for name, config in models.items():
        print(f"\n{name}: one request, context {args.context}\n{explain(config, machine, args.context)}")
        tables[name] = table(config, machine, args.context, args.batch, args.drafts)
        show(name, tables[name], args.drafts)
    if args.plot:
        args.out.mkdir(parents=True, exist_ok=True)
        plot(models, machine, args.context, args.out / "roofline.png")
    settings = {"bandwidth": machine.bandwidth, "flops": machine.flops, "launch_s": machine.launch}
    result = {"environment": common.environment(), "machine": settings, "context": args.context}
    common.save("roofline", {**result, "models": tables}, args.out)


if __name__ == "__main__":
    main()
