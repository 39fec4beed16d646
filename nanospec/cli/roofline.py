"""Why guessing tokens pays, before anything is measured: bytes, FLOPs and launches of a step.

A step scores T = B (K + 1) tokens for B requests with K drafts each. Its parts (the decoder's matrix
products, attention, head, sampling, what surrounds them) follow each other, and each takes at least

    max(bytes / bandwidth, FLOPs / rate)

Bytes are the weights once, the K/V of each request once for all its K + 1 queries, and what the
products read and write for every token: input, residual, output (gate and up count as two), new K/V,
logits. The sum over the parts is the *bound*. Besides, a kernel in a CUDA graph has to start and to
drain, usually about 1.3 us: the *estimate* adds that for every launch. Kernels of a layer may start before
the one ahead has ended (`kernels/overlap.py`), which hides some of it; how much has not been measured, so
nothing is taken off here, and `estimate.py` has a guess.

t(K) / t(0) is how many tokens a step must emit for K drafts to break even. With each draft accepted
with probability a (given those before it) a step emits (1 - a^(K+1)) / (1 - a).

The defaults are those of an H200: 4.3e12 B/s copied and 790e12 FLOP/s in bf16 were measured on one; nothing
of our kernels was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device import synchronize
from ..kernels.layer.linear import linear, pack
from ..kernels.layer.qkv_rope import holds_heads
from ..models.config import ModelConfig

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

    def ms(self, moved: float, computed: float) -> float:
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


def account(
    config: ModelConfig, B: int, K: int, context: int = 1024, itemsize: int = 2, arch: str = "sm_90"
) -> Step:
    """Count a step of the engine's kernels, as they are launched on `arch`; `itemsize` is bytes per weight,
    activation and logit."""
    T, L, V = B * (K + 1), config.num_layers, config.vocab_size
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    own = L if config.out_norms else 0
    seen = sum(min(context, window or context) for window in config.windows)  # K/V rows, over layers

    def product(name: str, rows: int, columns: int, besides: int = 0) -> Kernel:
        """[T, columns] x [rows, columns] -> [T, rows] in each layer, and what it moves besides per token."""
        moved = rows * columns + T * (columns + rows + besides)
        return Kernel(name, "products", L, itemsize * L * moved, 2 * T * L * rows * columns)

    if holds_heads(config.head_dim, config.qk_norm, arch):
        qkv = [product("qkv_rope", q + 2 * kv, H, besides=2 * kv)]
    else:
        rope = Kernel("rope_cache", "products", L, itemsize * T * L * 2 * kv)
        qkv = [product("norm_linear qkv", q + 2 * kv, H), rope]
    kernels = (
        Kernel("propose", "propose", 2 if K else 0, 4 * B * context if K else 0),
        Kernel("layout, embedding", "embedding", 2, itemsize * T * H),
        *qkv,
        Kernel("attention", "attention", L, itemsize * B * seen * 2 * kv, 4 * T * seen * q),
        product("linear_add o", H, q, besides=H),
        product("norm_swiglu", 2 * I, H),
        product("linear_add down", H, I, besides=H),
        Kernel("residual_add", "products", 2 * own, itemsize * 2 * own * T * 4 * H),
        Kernel("final norm", "head", 1),
        Kernel("head", "head", 1, itemsize * (H * V + T * V), 2 * T * H * V),
        Kernel("sample", "sample", 2, itemsize * T * V),
        Kernel("verify, commit, report", "commit", 1),
    )
    return Step(B, K, context, kernels)


def break_even(config: ModelConfig, B: int, K: int, context: int, machine: Machine) -> float:
    """t(K) / t(0): tokens per step at which K drafts cost nothing and gain nothing."""
    return account(config, B, K, context).bound(machine) / account(config, B, 0, context).bound(machine)


def expected_tokens(acceptance: float, K: int) -> float:
    """Tokens a step emits when each draft is accepted with this probability, given those before it."""
    return sum(acceptance**j for j in range(K + 1))


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """What PyTorch reads of 512 MiB, and a product of 1024 (GPU: 8192) square matrices."""
    on_gpu = device.type == "cuda"
    block = torch.ones(128 << 20, dtype=torch.float32, device=device)
    n = 8192 if on_gpu else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    weight = a if on_gpu else pack(a)  # by what the engine multiplies with on a CPU
    return Machine(
        bandwidth=block.nbytes / _fastest(block.sum, device),
        flops=2 * n**3 / _fastest(lambda: a @ a if on_gpu else linear(a, weight), device),
        launch=Machine.launch if on_gpu else 0.0,
    )


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five runs."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def explain(config: ModelConfig, machine: Machine, context: int, B: int = 1, K: int = 4) -> str:
    """Where the time of a step goes without drafts and with K, and what it takes to break even."""
    plain, spec = account(config, B, 0, context), account(config, B, K, context)
    columns = ["K=0: MB", "GFLOP", "us", f"K={K}: MB", "GFLOP", "us"] + ["launches"] * (machine.launch > 0)
    lines = [" " * 20 + "".join(f"{name:>11}" for name in columns)]
    for a, b in zip(plain.kernels, spec.kernels):
        lines.append(
            f"{b.name:20}{a.bytes / 1e6:11.1f}{a.flops / 1e9:11.2f}{1e3 * machine.ms(a.bytes, a.flops):11.1f}"
            f"{b.bytes / 1e6:11.1f}{b.flops / 1e9:11.2f}{1e3 * machine.ms(b.bytes, b.flops):11.1f}"
            + (f"{b.launches:11}" if machine.launch else "")
        )
    for name, step in (("without drafts", plain), (f"with {K} drafts", spec)):
        starts = f", {step.estimate(machine):.3f} with the starts of {step.launches} kernels"
        lines.append(
            f"{name}: {step.bound(machine):.3f} ms at these rates{starts if machine.launch else ''}; "
            f"{step.intensity:.1f} FLOPs per byte (ridge: {machine.ridge:.0f})"
        )
    ratio = break_even(config, B, K, context, machine)
    gains = ", ".join(f"{a:.0%}: {expected_tokens(a, K) / ratio:.2f}x" for a in ACCEPTANCES)
    lines.append(f"{K} drafts break even at {ratio:.2f} tokens per step; speed-up by acceptance: {gains}")
    return "\n".join(lines)
