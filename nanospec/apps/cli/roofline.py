"""Why guessing tokens pays, before anything is measured: what the account of a step (`account.py`) means.

t(K) / t(0) is how many tokens a step must emit for K drafts to break even. With each draft accepted
with probability a (given those before it) a step emits (1 - a^(K+1)) / (1 - a).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...kernels.layer.linear import linear, pack
from ...kernels.transfer import synchronize
from ...models.config import ModelConfig
from .account import Machine, account

ACCEPTANCES = (0.3, 0.5, 0.7, 0.9)


def break_even(config: ModelConfig, B: int, K: int, context: int, machine: Machine, gpus: int = 1) -> float:
    """t(K) / t(0): tokens per step at which K drafts cost nothing and gain nothing."""
    spec, plain = (account(config, B, k, context, gpus=gpus).bound(machine) for k in (K, 0))
    return spec / plain


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
