"""Lower bound of a step's time: bytes, FLOPs and kernel launches, counted from a model's shape.

A step scores T = B (K + 1) tokens for B requests with K drafts each. Its parts run one after the other, and
each takes at least max(bytes / bandwidth, FLOPs / rate). The bytes are the weights once, the K/V of each
request once for all of its K + 1 queries, and the inputs and outputs of the products for every token. The sum
over the parts is the *bound*; the *estimate* adds the launch of every kernel.

The default rates were measured on an H200 (copies and large matrix products).
"""

from dataclasses import dataclass

from nanospec.models.config import ModelConfig
from nanospec.models.families import config_of

KERNELS_PER_LAYER = 7  # qkv, rope, attention, and its combination if split; o, gate and up, down
ITEM = 2  # bytes of an activation, a logit
HEAD_BITS = 9  # least bits per weight of lm_head: 8, and 32 per group of 32


@dataclass(frozen=True)
class Machine:
    """The rates that bound a step.

    Attributes:
        bandwidth: bytes per second of the GPU's memory.
        flops: FLOPs per second of bf16 matrix products.
        launch: seconds to launch a kernel in a CUDA graph.
    """

    bandwidth: float = 4.3e12
    flops: float = 790e12
    launch: float = 1.3e-6


@dataclass(frozen=True)
class Step:
    """One forward pass.

    Attributes:
        parts: (bytes, FLOPs) of the parts that run one after the other.
        launches: the number of kernels.
    """

    parts: tuple[tuple[float, float], ...]
    launches: int

    def bound(self, machine: Machine) -> float:
        """Return the lower bound in ms, with kernel launches free."""
        return 1e3 * sum(max(moved / machine.bandwidth, flops / machine.flops) for moved, flops in self.parts)

    def estimate(self, machine: Machine) -> float:
        """Return the time in ms with kernel launches, everything else at full rate."""
        return self.bound(machine) + 1e3 * (self.launches * machine.launch)


def account(config: ModelConfig, B: int, K: int, context: int = 1024, bits: float = 8 * ITEM) -> Step:
    """Count a step of B requests with K drafts each and `context` cached tokens. `bits`: per weight, with
    scales; lm_head has at least 8 and their scales."""
    T, L, H, V = B * (K + 1), config.num_layers, config.hidden_size, config.vocab_size
    seen = sum(min(context, window or context) for window in config.windows)  # K/V rows, over the layers
    text = B * context * (K > 0)  # tokens that n-gram lookup searches
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    weights = L * (H * (q + 2 * kv) + q * H + 3 * H * inner)
    per_token = L * ((H + q + 4 * kv) + (q + 2 * H) + (H + 2 * inner) + (inner + 2 * H))
    parts = (
        (4 * text, 0),
        (ITEM * T * H, 0),
        (bits / 8 * weights + ITEM * T * per_token, 2 * T * weights),
        (ITEM * 2 * B * seen * kv, 4 * T * seen * q),
        (max(bits, HEAD_BITS) / 8 * H * V + ITEM * T * V, 2 * T * H * V),
        (ITEM * T * V, 0),  # sampling
    )
    return Step(parts, KERNELS_PER_LAYER * L + 9 + (text > 0))


# ---- shapes of real models -----------------------------------------------------------------------------


def _shape(family: str, sizes: tuple[int, ...], tied: bool, window: int) -> ModelConfig:
    """Return a config. `sizes`: hidden, intermediate, layers, heads, KV heads, head dimension, vocabulary."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )  # fmt: skip
    config = {"architectures": [f"{family}ForCausalLM"], "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
    more = {"tie_word_embeddings": tied, "max_position_embeddings": window}
    return config_of({**config, **more, **dict(zip(names, sizes))})


MODELS = {
    "smollm2-135m": _shape("Llama", (576, 1536, 30, 9, 3, 64, 49152), True, 8192),
    "qwen3-0.6b": _shape("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936), True, 40960),
    "llama-3.2-1b": _shape("Llama", (2048, 8192, 16, 32, 8, 64, 128256), True, 131072),
    "qwen3-8b": _shape("Qwen3", (4096, 12288, 36, 32, 8, 128, 151936), False, 40960),
    "llama-3.3-70b": _shape("Llama", (8192, 28672, 80, 64, 8, 128, 128256), False, 131072),
}
