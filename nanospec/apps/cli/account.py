"""Bytes, FLOPs, launches and exchanges of a step, counted from a model's shape.

A step scores T = B (K + 1) tokens for B requests with K drafts each. Its parts (the decoder's matrix
products, attention, head, sampling, what surrounds them) follow each other, and each takes at least

    max(bytes / bandwidth, FLOPs / rate)

Bytes are the weights once, the K/V of each request once for all its K + 1 queries, and what the
products read and write for every token: input, residual, output (gate and up count as two), new K/V,
logits. The sum over the parts is the *bound*. Besides, a kernel in a CUDA graph has to start and to
drain, usually about 1.3 us: the *estimate* adds that for every launch. Kernels of a layer may start before
the one ahead has ended (`kernels/dependent_launch.py`), which hides some of it; how much was not measured,
so nothing is taken off here, and `estimate.py` has a guess. A prompt's pass is counted in the same way.

Split over N GPUs of one machine (tensor parallelism) each has a share of the heads, of the MLP and of the
vocabulary. They exchange embeddings, candidates for the next token or whole logits, and two sums a layer,
whose parts are gathered or added a slice each: by the engine's own rule (`kernels/layer/vocab_parallel.py`),
unless told. What is received counts into the bound, every exchange costs `exchange` in the estimate, and
neither overlaps with computing.

The defaults are those of an H200: 4.3e12 B/s copied and 790e12 FLOP/s in bf16 were measured on one; nothing
of our kernels was, and nothing between GPUs: there others' figures of an H100 are taken (`Machine`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...device.memory import GPU_SHARE
from ...kernels.layer.qkv_rope import holds_heads
from ...kernels.layer.vocab_parallel import in_slices
from ...kernels.sampling.scan import CHUNK
from ...models.config import ModelConfig


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
        whole: GPUs that share the vocabulary gather all logits, as a split draft model does, and a step in
            which somebody asks for more than the likeliest token; else candidates.
    """

    tokens: int
    logits: int
    read: int
    pairs: int
    looked_up: int = 0
    whole: bool = False


def account(
    config: ModelConfig,
    B: int,
    K: int,
    context: int = 1024,
    itemsize: int = 2,
    arch: str = "sm_90",
    gpus: int = 1,
    slices: bool | None = None,
    whole: bool = False,
) -> Step:
    """Count a step of B requests with K drafts each and `context` cached tokens, as the engine launches it on
    `arch`; `itemsize` is bytes per weight, activation and logit. `slices`: whether sums over `gpus` are added
    in slices, None: as the engine decides. `whole`: see `Work`."""
    T = B * (K + 1)
    seen = sum(min(context, window or context) for window in config.windows)  # K/V rows, over layers
    work = Work(T, T, B * seen, T * seen, B * context * (K > 0), whole)
    return count(config, work, itemsize, arch, gpus, slices)


def prefill(config: ModelConfig, tokens: int, start: int = 0, gpus: int = 1) -> Step:
    """Count the pass over `tokens` of a prompt behind `start` cached ones, of which the last is scored."""
    read = pairs = 0
    for window in config.windows:
        end, most = start + tokens, window or start + tokens
        short = max(min(end, most) - start, 0)  # tokens that see all before them
        read += min(end, most + tokens - 1)
        pairs += short * start + short * (short + 1) // 2 + (tokens - short) * most
    return count(config, Work(tokens, 1, read, pairs), gpus=gpus)


def count(
    config: ModelConfig,
    work: Work,
    itemsize: int = 2,
    arch: str = "sm_90",
    gpus: int = 1,
    slices: bool | None = None,
) -> Step:
    """The kernels of a pass on one of `gpus`."""
    T, L, H = work.tokens, config.num_layers, config.hidden_size
    q, kv = _heads(config, gpus)
    kernels = (
        Kernel("propose", "propose", 2 if work.looked_up else 0, 4 * work.looked_up),
        Kernel("layout, embedding", "embedding", 2, itemsize * T * H),
        *([_lookup(itemsize * T * H, gpus)] if gpus > 1 else []),
        *_inputs(config, T, itemsize, arch, gpus),
        Kernel("attention", "attention", L, itemsize * work.read * 2 * kv, 4 * work.pairs * q),
        *_outputs(config, T, itemsize, gpus),
        *([_sums(2 * L, T, itemsize * H, gpus, slices)] if gpus > 1 else []),
        Kernel("final norm", "head", 1),
        *_head(config, work, itemsize, gpus),
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


def _lookup(message: int, gpus: int) -> Kernel:
    """`Vocabulary.lookup`: each GPU's rows of the embedding, zeros for the others' tokens, and their sum."""
    return Kernel("rows of all", "embedding", 11, (gpus + 5) * message, 0, 1, (gpus - 1) * message)


def _sums(number: int, T: int, row: int, gpus: int, slices: bool | None) -> Kernel:
    """`Summed.parts` of T rows of so many bytes, and `residual_add` of what it gives."""
    if slices is None:
        slices = in_slices(T * row, gpus)
    if not slices:
        exchanges, received, launches, added = 1, (gpus - 1) * T * row, 1, (gpus + 1) * T * row
    else:  # torch cuts, adds part by part and rounds
        part = -(-T // gpus) * row  # of the rows that a GPU adds for all
        exchanges, received = 2, 2 * (gpus - 1) * part
        launches, added = gpus + 3 + (T % gpus > 0), (5 * gpus + 1) * part
    return Kernel("sums", "sums", number * launches, number * added, 0, number * exchanges, number * received)


def _head(config: ModelConfig, work: Work, itemsize: int, gpus: int) -> list[Kernel]:
    """Logits of a share of the vocabulary, what of them is exchanged, and drawing from it."""
    H, rows, V = config.hidden_size, work.logits, -(-config.vocab_size // gpus)
    head = Kernel("head", "head", 1, itemsize * (H * V + rows * V), 2 * rows * H * V)
    if gpus == 1 or not work.whole:
        given = 8 * rows * -(-V // CHUNK.value)  # a value and a token of each chunk
        sample = Kernel("sample", "sample", 2, itemsize * rows * V, 0, int(gpus > 1), (gpus - 1) * given)
        return [head, sample]
    given = itemsize * rows * V
    logits = Kernel("logits of all", "head", 2, 4 * gpus * given, 0, 1, (gpus - 1) * given)
    return [head, logits, Kernel("sample", "sample", 2, itemsize * rows * config.vocab_size)]


def kv_tokens(config: ModelConfig, machine: Machine, gpus: int = 1, itemsize: int = 2) -> int:
    """Cached tokens for which the GPUs that share the model have room; 0 if it does not fit."""
    weights = itemsize * config.num_parameters / gpus
    per_token = itemsize * 2 * config.num_layers * _heads(config, gpus)[1]
    return max(int((GPU_SHARE * machine.memory - weights) / per_token), 0)
