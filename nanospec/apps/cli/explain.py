"""`--explain`: when speculation pays off on this machine.

A step that scores T tokens reads every weight once for any T, and computes 2 FLOPs per weight and token.
So each of its parts takes at least

    max(bytes / bandwidth, FLOPs / rate)

Bandwidth and rate are measured here, and so are the times of real steps. They predict the speedup of an
answer: emitting t tokens per step, with 1 + d tokens scored per step on average, should be
t * ms(1) / ms(1 + d) times as fast as emitting one token per step.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ...config import SamplingParams
from ...drafters.estimates import StepCosts
from ...kernels.layer.linear import make_linear
from ...kernels.transfer import synchronize
from ...llm import LLM
from ...models.config import ModelConfig
from ...models.decoder import Model
from ...models.weights import VOCABULARY
from .console import Console
from .demo import REQUESTS, decode_rate

CONTEXT = 1024  # cached tokens whose keys and values a step reads
BLOCK, CPU_SIDE, GPU_SIDE = 512 << 20, 1024, 8192  # bytes to read; sizes of the square matrices to multiply
REPEATS = 5
MAX_TOKENS, WINDOW = 128, 512  # length of the measured answer, and the context length that it needs
ACCEPTANCES, DRAFTS = (0.3, 0.5, 0.7, 0.9), 4


class Machine(NamedTuple):
    """Memory bandwidth in bytes per second, and FLOPs per second of matrix products in the model's dtype."""

    bandwidth: float
    flops: float


class Part(NamedTuple):
    """The minimum bytes read and FLOPs computed by a part of a step."""

    name: str
    bytes: int
    flops: int

    def ms(self, machine: Machine) -> float:
        """Return the minimum time in ms."""
        return 1e3 * max(self.bytes / machine.bandwidth, self.flops / machine.flops)

    def cells(self, machine: Machine) -> tuple[str, str, str]:
        """Return MB, GFLOP and minimum ms as table cells."""
        return f"{self.bytes / 1e6:.1f}", f"{self.flops / 1e9:.2f}", f"{self.ms(machine):.2f}"


def stored_bytes(model: Model) -> tuple[int, int]:
    """Return the bytes of the decoder layers' matrices and of lm_head, in the format of each."""
    *layers, head = (linear.nbytes for linear in model.linears)
    return sum(layers), head


def parts(
    config: ModelConfig, tokens: int, context: int, itemsize: int, stored: tuple[int, int] | None = None
) -> list[Part]:
    """Return the parts of a step that scores `tokens` tokens of one request after `context` cached tokens.
    `itemsize` is the size of a cached value in bytes, and of a weight unless their bytes are given as in
    `stored_bytes`. Activations are ignored, as they are small and stay in caches."""
    head = config.vocab_size * config.hidden_size
    shapes = config.parameter_shapes().items()
    layers = sum(math.prod(shape) for name, shape in shapes if name not in VOCABULARY)
    attended = sum(min(context, window or context) for window in config.windows)  # positions, over all layers
    cached = 2 * config.num_kv_heads * config.head_dim  # values of a position: key and value
    scores = config.num_heads * config.head_dim
    stored = stored or (itemsize * layers, itemsize * head)
    return [
        Part("layers", stored[0], 2 * layers * tokens),
        Part("attention", itemsize * cached * attended, 4 * scores * attended * tokens),
        Part("head", stored[1], 2 * head * tokens),
    ]


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time reading 512 MiB, and a product of square matrices (PyTorch's on a GPU, else the engine's)."""
    block = torch.ones(BLOCK // 4, dtype=torch.float32, device=device)
    n = GPU_SIDE if device.type == "cuda" else CPU_SIDE
    a = torch.randn(n, n, device=device).to(dtype)
    linear = make_linear(a)
    product = (lambda: a @ a) if device.type == "cuda" else (lambda: linear(a))
    return Machine(block.nbytes / _fastest(block.sum, device), 2 * n**3 / _fastest(product, device))


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of the fastest run in seconds."""

    def timed() -> None:
        run()
        synchronize(device)

    return min(timeit.repeat(timed, number=1, repeat=REPEATS))


def explain(llm: LLM, console: Console) -> None:
    """Print the measurements of this model on this machine."""
    engine, model = llm.engine, llm.engine.worker.model
    machine, itemsize, stored = measure(model.device, model.dtype), model.dtype.itemsize, stored_bytes(model)
    context = min(CONTEXT, engine.max_model_len)
    rates = f"{machine.bandwidth / 1e9:.0f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s"
    console.line(f"{rates} in {str(model.dtype).removeprefix('torch.')}")
    console.line(f"\nOne step of one request after {context} cached tokens, with 0 and {DRAFTS} drafts:")
    counts = [parts(model.config, tokens, context, itemsize, stored) for tokens in (1, 1 + DRAFTS)]
    rows = [(one.name, *one.cells(machine), *more.cells(machine)) for one, more in zip(*counts)]
    console.table(("", *("MB", "GFLOP", "min ms") * 2), rows)
    costs = engine.policy.costs or engine.worker.measure()
    cached = 0 if costs.packed else min(CONTEXT, engine.max_model_len // 2)  # as in `timing.dummy_rows`
    console.line(f"\nMeasured step times after {cached} cached tokens:")
    ms = costs.packed or {1 + k: step_ms for k, step_ms in costs.by_k(1, engine.worker.max_k).items()}
    rows = []
    for tokens, step_ms in ms.items():
        counted = parts(model.config, tokens, max(cached, 1), itemsize, stored)
        least = sum(part.ms(machine) for part in counted)
        rows.append((str(tokens), f"{least:.2f}", f"{step_ms:.2f}", f"{step_ms / ms[1]:.2f}x"))
    console.table(("tokens scored", "min ms", "measured ms", "vs one token"), rows)
    if llm.config.spec.max_k:
        _explain_answer(llm, console, ms)


def _explain_answer(llm: LLM, console: Console, ms: Mapping[int, float]) -> None:
    """Print when drafts pay off, and the predicted and measured speedup of the demo's code edit."""
    measured = StepCosts(packed=ms)
    ratio = measured.cost(1, 1 + DRAFTS) / ms[1]
    gains = ", ".join(f"{a:.0%}: {sum(a**j for j in range(1 + DRAFTS)) / ratio:.2f}x" for a in ACCEPTANCES)
    worker = llm.engine.worker
    is_excluded = worker.graphs is None and any(drafter.runs_model for drafter in worker.drafters)
    note = ", without the time of drafting" if is_excluded else ""
    console.line(
        f"\n{DRAFTS} drafts break even at {ratio:.2f} tokens per step{note}; by acceptance rate: {gains}"
    )
    if llm.engine.max_model_len < WINDOW:
        return
    text, chats = REQUESTS["code edit"], llm.tokenizer.has_chat_template
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chats else text
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    [plain] = llm.generate(prompt, replace(params, num_speculative_tokens=0))
    [spec] = llm.generate(prompt, params)
    stats = spec.stats
    drafted = stats.num_drafted / stats.num_steps
    predicted = stats.tokens_per_step * ms[1] / measured.cost(1, 1 + drafted)
    console.line(
        f"Code edit: {stats.tokens_per_step:.2f} tokens per step with {drafted:.1f} drafts; speedup "
        f"{predicted:.2f}x predicted, {decode_rate(spec) / decode_rate(plain):.2f}x measured"
    )
