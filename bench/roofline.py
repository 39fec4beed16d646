"""The least time of a step: bytes, FLOPs, kernel starts and exchanges, counted from a model's shape.

A step scores T = B (K + 1) tokens for B requests with K drafts each. Its parts follow each other, and each
takes at least max(bytes / bandwidth, FLOPs / rate). Bytes are the weights once, the K/V of each request once
for all its K + 1 queries, and what the products read and write for every token. The sum over the parts is
the *bound*; the *estimate* adds the start of every kernel and of every exchange between GPUs.

Split over N GPUs of one machine (tensor parallelism), each has a share of the heads, of the MLP and of the
vocabulary. Two sums a layer, the embeddings and the logits of the scored tokens are exchanged; none of them
overlaps with computing.

The default rates were measured on an H200 (copies and large products); the figures between GPUs are others'
figures of an H100. No kernel of this engine has been measured on either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanospec.models.config import ModelConfig
from nanospec.models.families import config_of

KERNELS_PER_LAYER = 5
ITEM = 2  # bytes of a weight, an activation, a logit


@dataclass(frozen=True)
class Machine:
    """What bounds a step.

    Attributes:
        bandwidth: bytes per second of its memory.
        flops: FLOPs per second of bf16 matrix products.
        launch: seconds that the start of a kernel in a CUDA graph costs.
        memory: bytes of it (data sheet).
        link: bytes per second that a GPU receives from the others of its machine (NCCL's issue 1442).
        exchange: seconds that an exchange costs besides its bytes. Sums of up to 64 KiB take 6 to 8 us at
            best and 17 to 20 by NCCL (SGLang's pull request 22734).
    """

    bandwidth: float = 4.3e12
    flops: float = 790e12
    launch: float = 1.3e-6
    memory: float = 141e9
    link: float = 370e9
    exchange: float = 10e-6


@dataclass(frozen=True)
class Step:
    """One pass over the weights, as one of the GPUs that share it sees it.

    Attributes:
        parts: (bytes, FLOPs) of what runs one after the other.
        launches: kernels.
        sums: bytes of each sum over the GPUs; `received` are the bytes of all other exchanges, `exchanges`
            their number.
    """

    parts: tuple[tuple[float, float], ...]
    launches: int
    gpus: int = 1
    sums: tuple[float, ...] = ()
    received: float = 0
    exchanges: int = 0

    def bound(self, machine: Machine) -> float:
        """Least ms, if kernels and exchanges started at once."""
        busy = sum(max(moved / machine.bandwidth, flops / machine.flops) for moved, flops in self.parts)
        sums = sum(self._sum(size, machine)[0] for size in self.sums)
        return 1e3 * (busy + self.received / machine.link + sums)

    def estimate(self, machine: Machine) -> float:
        """ms with the starts of kernels and exchanges, everything else at full rate."""
        exchanges = self.exchanges + sum(self._sum(size, machine)[1] for size in self.sums)
        return self.bound(machine) + 1e3 * (self.launches * machine.launch + exchanges * machine.exchange)

    def _sum(self, size: float, machine: Machine) -> tuple[float, int]:
        """(seconds, exchanges) of the faster of two ways: all summands gathered, or each GPU adds a slice."""
        others = self.gpus - 1
        gathered = others * size / machine.link, 1
        sliced = 2 * others / self.gpus * size / machine.link, 2
        return min(gathered, sliced, key=lambda way: way[0] + way[1] * machine.exchange)


def account(config: ModelConfig, B: int, K: int, context: int = 1024, gpus: int = 1) -> Step:
    """Count a step of B requests with K drafts each and `context` cached tokens."""
    T = B * (K + 1)
    seen = sum(min(context, window or context) for window in config.windows)  # K/V rows, over the layers
    return _count(config, T, T, B * seen, T * seen, B * context * (K > 0), gpus)


def prefill(config: ModelConfig, tokens: int, start: int = 0, gpus: int = 1) -> Step:
    """Count the pass over `tokens` of a prompt after `start` cached ones; its last token is scored. Windows
    are not considered."""
    L = config.num_layers
    pairs = L * (tokens * start + tokens * (tokens + 1) // 2)
    return _count(config, tokens, 1, L * (start + tokens), pairs, 0, gpus)


def _count(config: ModelConfig, T: int, scored: int, read: int, pairs: int, text: int, gpus: int) -> Step:
    """A pass of T tokens, of which `scored` get logits.

    `read` counts the cached positions that are read and `pairs` the (token, visible position) pairs, both
    summed over the layers; `text` counts the tokens that n-gram lookup searches.
    """
    L, H, V = config.num_layers, config.hidden_size, -(-config.vocab_size // gpus)
    q = config.num_heads // gpus * config.head_dim
    kv = max(config.num_kv_heads // gpus, 1) * config.head_dim
    inner = config.intermediate_size // gpus
    weights = L * (H * (q + 2 * kv) + q * H + 3 * H * inner)
    per_token = L * ((H + q + 4 * kv) + (q + 2 * H) + (H + 2 * inner) + (inner + 2 * H))
    parts = (
        (4 * text, 0),
        (ITEM * T * H, 0),
        (ITEM * (weights + T * per_token), 2 * T * weights),
        (ITEM * 2 * read * kv, 4 * pairs * q),
        (ITEM * (H * V + scored * V), 2 * scored * H * V),
        (ITEM * scored * V * (gpus if gpus == 1 else 3 * gpus), 0),  # sampling, and copying what was gathered
    )
    launches = KERNELS_PER_LAYER * L + 7 + 2 * (text > 0)
    if gpus == 1:
        return Step(parts, launches)
    sums = (ITEM * T * H,) * (2 * L)
    added = (2 * L * (gpus + 1) * ITEM * T * H, 0)
    received = (gpus - 1) * ITEM * (T * H + scored * V)  # the embeddings of all tokens, the logits
    return Step((*parts, added), launches + 2 * L + 11, gpus, sums, received, 2)


def kv_tokens(config: ModelConfig, machine: Machine, gpus: int = 1, share: float = 0.9) -> int:
    """Cached tokens for which the GPUs that share the model have room; 0 if the model does not fit."""
    per_token = ITEM * 2 * config.num_layers * max(config.num_kv_heads // gpus, 1) * config.head_dim
    weights = ITEM * sum(math.prod(shape) for shape in config.parameter_shapes().values())
    return max(int((share * machine.memory - weights / gpus) / per_token), 0)


# ---- shapes of real models -----------------------------------------------------------------------------


def _shape(family: str, sizes: tuple[int, ...], tied: bool, window: int) -> ModelConfig:
    """`sizes`: hidden, MLP, layers, heads, heads of keys, head dimension, vocabulary."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )  # fmt: skip
    return config_of(
        {
            "architectures": [f"{family}ForCausalLM"],
            **dict(zip(names, sizes)),
            "tie_word_embeddings": tied,
            "max_position_embeddings": window,
            "rms_norm_eps": 1e-6,
            "dtype": "bfloat16",
        }
    )


MODELS = {
    "smollm2-135m": _shape("Llama", (576, 1536, 30, 9, 3, 64, 49152), True, 8192),
    "qwen3-0.6b": _shape("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936), True, 40960),
    "llama-3.2-1b": _shape("Llama", (2048, 8192, 16, 32, 8, 64, 128256), True, 131072),
    "qwen3-8b": _shape("Qwen3", (4096, 12288, 36, 32, 8, 128, 151936), False, 40960),
    "llama-3.3-70b": _shape("Llama", (8192, 28672, 80, 64, 8, 128, 128256), False, 131072),
}
