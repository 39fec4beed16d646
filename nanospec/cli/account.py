"""Bytes, FLOPs, launches and exchanges of a step, counted from a model's shape.

A step scores T = B (K + 1) tokens for B requests with K drafts each. Its parts (the decoder's matrix
products, attention, head, sampling, what surrounds them) follow each other, and each takes at least

    max(bytes / bandwidth, FLOPs / rate)

Bytes are the weights once, the K/V of each request once for all its K + 1 queries, and what the
products read and write for every token: input, residual, output (gate and up count as two), new K/V,
logits. The sum over the parts is the *bound*. Besides, a kernel in a CUDA graph has to start and to
drain, usually about 1.3 us: the *estimate* adds that for every launch. Kernels of a layer may start before
the one ahead has ended (`kernels/overlap.py`), which hides some of it; how much has not been measured, so
nothing is taken off here, and `estimate.py` has a guess. A prompt's pass is counted in the same way.

Split over N GPUs of one machine (tensor parallelism) each has a share of the heads, of the MLP and of the
vocabulary, and a layer has two sums over them. Every GPU gathers the parts of the N - 1 others and adds all
in the order of their ranks, so that a sum's bits do not depend on who comes first: it receives N - 1
messages, where a ring receives 2 (N - 1) / N. (Adding a slice each in that order and gathering the sums moves
as little as a ring, and takes two exchanges as that does.) Logits are gathered, and every GPU draws the same
tokens. What is received counts into the bound, every exchange costs `exchange` in the estimate, and neither
overlaps with computing.

The defaults are those of an H200: 4.3e12 B/s copied and 790e12 FLOP/s in bf16 were measured on one; nothing
of our kernels was, and nothing between GPUs: there others' figures of an H100 are taken (`Machine`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.layer.qkv_rope import holds_heads
from ..memory import GPU_SHARE
from ..models.config import ModelConfig


@dataclass(frozen=True)
class Machine:
    """What bounds a step.

    Attributes:
        bandwidth: bytes per second that memory delivers.
        flops: FLOPs per second of matrix products in the model's dtype.
        launch: seconds that a kernel inside a CUDA graph costs besides its work.
        memory: bytes of it (data sheet).
        link: bytes per second that a GPU receives over NVLink: 450e9 at the wire, of which applications see
            370e9 (a developer of NCCL in its issue 1442).
        exchange: seconds that an exchange of any size between the GPUs of a machine costs besides its bytes.
            In CUDA graphs sums of up to 64 KiB take 6 to 8 us at best and 17 to 20 by NCCL (SGLang's pull
            request 22734); by the latencies NCCL reckons with (its issue 1334) a gather over 8 takes 10.8.
    """

    bandwidth: float = 4.3e12
    flops: float = 790e12
    launch: float = 1.3e-6
    memory: float = 141e9
    link: float = 370e9
    exchange: float = 10e-6

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
        exchanges: between the GPUs that share the step; `received` are the bytes that each gets in them.
    """

    name: str
    part: str
    launches: int
    bytes: int = 0
    flops: int = 0
    exchanges: int = 0
    received: int = 0


@dataclass(frozen=True)
class Step:
    """One pass over the weights with so many tokens, as one of the GPUs that share it sees it."""

    tokens: int
    kernels: tuple[Kernel, ...]

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
    def exchanges(self) -> int:
        return sum(kernel.exchanges for kernel in self.kernels)

    @property
    def received(self) -> int:
        return sum(kernel.received for kernel in self.kernels)

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
        """Least ms, if launches and exchanges started at once."""
        return sum(self.parts(machine).values()) + 1e3 * self.received / machine.link

    def estimate(self, machine: Machine) -> float:
        """ms with what launches and exchanges cost to start, everything else at full rate."""
        starts = self.launches * machine.launch + self.exchanges * machine.exchange
        return self.bound(machine) + 1e3 * starts


@dataclass(frozen=True)
class Work:
    """What a pass has to do, however it came about; all that a step costs is counted from it.

    Attributes:
        tokens: that go through the layers, and `logits` of them through the head.
        read: cached positions whose K/V are read, `pairs` of a token and a position that it sees; both are
            summed over the layers.
        looked_up: tokens of text in which guesses are looked for.
    """

    tokens: int
    logits: int
    read: int
    pairs: int
    looked_up: int = 0


def account(
    config: ModelConfig,
    B: int,
    K: int,
    context: int = 1024,
    itemsize: int = 2,
    arch: str = "sm_90",
    gpus: int = 1,
    ring: bool = False,
) -> Step:
    """Count a step of B requests with K drafts each and `context` cached tokens, as the engine launches it on
    `arch`; `itemsize` is bytes per weight, activation and logit. `ring`: sums move what a ring moves."""
    T = B * (K + 1)
    seen = sum(min(context, window or context) for window in config.windows)  # K/V rows, over layers
    return count(config, Work(T, T, B * seen, T * seen, B * context * (K > 0)), itemsize, arch, gpus, ring)


def prefill(config: ModelConfig, tokens: int, start: int = 0, gpus: int = 1, ring: bool = False) -> Step:
    """Count the pass over `tokens` of a prompt behind `start` cached ones, of which the last is scored."""
    read = pairs = 0
    for window in config.windows:
        end, most = start + tokens, window or start + tokens
        short = max(min(end, most) - start, 0)  # tokens that see all before them
        read += min(end, most + tokens - 1)
        pairs += short * start + short * (short + 1) // 2 + (tokens - short) * most
    return count(config, Work(tokens, 1, read, pairs), gpus=gpus, ring=ring)


def count(
    config: ModelConfig, work: Work, itemsize: int = 2, arch: str = "sm_90", gpus: int = 1, ring: bool = False
) -> Step:
    """The kernels of a pass on one of `gpus`."""
    T, L, H = work.tokens, config.num_layers, config.hidden_size
    q, kv = _heads(config, gpus)
    kernels = (
        Kernel("propose", "propose", 2 if work.looked_up else 0, 4 * work.looked_up),
        Kernel("layout, embedding", "embedding", 2, itemsize * T * H),
        *_inputs(config, T, itemsize, arch, gpus),
        Kernel("attention", "attention", L, itemsize * work.read * 2 * kv, 4 * work.pairs * q),
        *_outputs(config, T, itemsize, gpus),
        *([_sums(2 * L, itemsize * T * H, gpus, ring)] if gpus > 1 else []),
        Kernel("final norm", "head", 1),
        _head(config, work.logits, itemsize, gpus),
        Kernel("sample", "sample", 2, itemsize * work.logits * config.vocab_size),
        Kernel("verify, commit, report", "commit", 1),
    )
    return Step(T, kernels)


def _product(name: str, L: int, T: int, rows: int, columns: int, itemsize: int, besides: int = 0) -> Kernel:
    """[T, columns] x [rows, columns] -> [T, rows] in each of L layers; what it moves besides per token."""
    moved = rows * columns + T * (columns + rows + besides)
    return Kernel(name, "products", L, itemsize * L * moved, 2 * T * L * rows * columns)


def _inputs(config: ModelConfig, T: int, itemsize: int, arch: str, gpus: int) -> list[Kernel]:
    """Ahead of attention."""
    L, H, (q, kv) = config.num_layers, config.hidden_size, _heads(config, gpus)
    if holds_heads(config.head_dim, config.qk_norm, arch):
        return [_product("qkv_rope", L, T, q + 2 * kv, H, itemsize, besides=2 * kv)]
    rope = Kernel("rope_cache", "products", L, itemsize * T * L * 2 * kv)
    return [_product("norm_linear qkv", L, T, q + 2 * kv, H, itemsize), rope]


def _outputs(config: ModelConfig, T: int, itemsize: int, gpus: int) -> list[Kernel]:
    """Behind it."""
    L, H, (q, _) = config.num_layers, config.hidden_size, _heads(config, gpus)
    I = config.intermediate_size // gpus  # noqa: E741
    own = L if config.out_norms else 0
    return [
        _product("linear_add o", L, T, H, q, itemsize, besides=H),
        _product("norm_swiglu", L, T, 2 * I, H, itemsize),
        _product("linear_add down", L, T, H, I, itemsize, besides=H),
        Kernel("residual_add", "products", 2 * own, itemsize * 2 * own * T * 4 * H),
    ]


def _heads(config: ModelConfig, gpus: int) -> tuple[int, int]:
    """Values of the queries and of the keys on each of the GPUs. ValueError if heads cannot be split so."""
    heads, kv = config.num_heads, config.num_kv_heads
    if heads % gpus or (kv % gpus and gpus % kv) or config.intermediate_size % gpus:
        raise ValueError(
            f"{gpus} GPUs cannot share {heads} heads, {kv} heads of keys and an MLP of "
            f"{config.intermediate_size}: the number of GPUs must divide all three (or be a multiple of the "
            "second)."
        )
    return heads // gpus * config.head_dim, max(kv // gpus, 1) * config.head_dim


def _sums(number: int, message: int, gpus: int, ring: bool) -> Kernel:
    """Of messages of so many bytes over the GPUs."""
    received = 2 * (gpus - 1) * message // gpus if ring else (gpus - 1) * message
    added = (3 if ring else gpus + 1) * message
    return Kernel("sums", "sums", number, number * added, 0, number * (1 + ring), number * received)


def _head(config: ModelConfig, rows: int, itemsize: int, gpus: int) -> Kernel:
    """Logits of a share of the vocabulary, and the others' gathered."""
    H, V = config.hidden_size, -(-config.vocab_size // gpus)
    received = itemsize * (gpus - 1) * rows * V
    moved, flops = itemsize * (H * V + rows * V), 2 * rows * H * V
    return Kernel("head", "head", 1, moved, flops, int(gpus > 1), received)


def kv_tokens(config: ModelConfig, machine: Machine, gpus: int = 1, itemsize: int = 2) -> int:
    """Cached tokens for which the GPUs that share the model have room; 0 if it does not fit. The embedding is
    on all of them, everything else is split."""
    table = config.vocab_size * config.hidden_size
    weights = itemsize * (table + (config.num_parameters - table) / gpus)
    per_token = itemsize * 2 * config.num_layers * _heads(config, gpus)[1]
    return max(int((GPU_SHARE * machine.memory - weights) / per_token), 0)
