"""The architecture of a decoder: one frozen `ModelConfig` for all model families.

Everything that varies in `decoder.py` is a field here. `families/` translates the `config.json` of each
family into a `ModelConfig`, so no other file depends on the family.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..kernels.layer.rope_cache import cos_sin
from ..text.validation import shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (RoPE) of q and k, applied by `kernels/layer/rope_cache.py`.

    Pair i of a head of dimension D is rotated by the angle position * theta^(-2i/D) (Su et al., 2021,
    https://arxiv.org/abs/2104.09864). If only R values of a head are rotated, R replaces D, and the last
    (D - R)/2 pairs have the angle 0; `Phi3.convert` reorders such heads.

    Models whose context was extended after pretraining scale the frequencies. "linear" divides all by
    `factor`. "llama3" divides those with wavelengths above original_max_len / low_freq_factor, keeps those
    with wavelengths below original_max_len / high_freq_factor, and interpolates in between. "longrope"
    (https://arxiv.org/abs/2402.13753) divides each pair by its own factor: the long factors for all texts if
    max_position_embeddings exceeds original_max_len, since cached keys cannot be rotated again.
    """

    kind: Literal["default", "linear", "llama3", "longrope"] = "default"
    theta: float = 10000.0
    factor: float = 1.0  # extended context / pretraining context, for linear and llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    part: float = 1.0  # fraction of each head that is rotated
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    amplitude: float = 1.0  # cos and sin, hence q and k, are multiplied by it

    def rotated(self, head_dim: int) -> int:
        """Return the number of values of a head that are rotated."""
        return int(head_dim * self.part)


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder. Raises ValueError for values that do not fit together."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # sliding window w per layer: itself and w - 1 tokens before; None: all
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None  # for layers with a sliding window, if it differs from `rope`
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # for all three projections
    qk_norm: bool = False  # RMSNorm of each head of q and k before the rotation
    out_norms: bool = False  # RMSNorm of the outputs of attention and MLP before the residual addition
    gate: Literal["silu", "gelu"] = "silu"  # activation of the MLP; "gelu" is the tanh approximation
    query_scalar: float | None = None  # q . k is divided by its square root; None: `head_dim`
    attention_softcap: float | None = None  # c: attention scores x become c * tanh(x / c) before softmax
    logit_softcap: float | None = None  # the same for the logits
    embedding_scale: float = 1.0  # embeddings are multiplied by it, rounded to the compute dtype
    tie_word_embeddings: bool = False  # lm_head shares the weight of the embedding
    dtype: str = "float32"  # one of `DTYPES`; that of the checkpoint, according to its config

    def __post_init__(self) -> None:
        heads, kv, rotated = self.num_heads, self.num_kv_heads, self.rope.rotated(self.head_dim)
        if heads % kv:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv}.")
        if self.head_dim % 2 or rotated % 2:
            problem = f"head_dim={self.head_dim} must be even"
            raise ValueError(f"{problem}, and so must be the number of values that RoPE rotates, {rotated}.")
        factors = {len(self.rope.short_factors), len(self.rope.long_factors)}
        if self.rope.kind == "longrope" and factors != {rotated // 2}:
            raise ValueError(f"longrope needs a short and a long factor for each of {rotated // 2} pairs.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={shown(self.dtype)} must be one of {', '.join(DTYPES)}.")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, in order of use. Names are those of Llama checkpoints;
        `families/` maps others to them. Weights of norms are plain factors (Gemma stores w - 1)."""
        H, I, D = self.hidden_size, self.intermediate_size, self.head_dim  # noqa: E741
        q, kv = self.num_heads * D, self.num_kv_heads * D
        head_norms = [("self_attn.q_norm", (D,), False), ("self_attn.k_norm", (D,), False)]
        layer: list[tuple[str, tuple[int, ...], bool]] = [  # name, shape of the weight, whether it has a bias
            ("input_layernorm", (H,), False),
            ("self_attn.q_proj", (q, H), self.qkv_bias),
            ("self_attn.k_proj", (kv, H), self.qkv_bias),
            ("self_attn.v_proj", (kv, H), self.qkv_bias),
            *(head_norms if self.qk_norm else []),
            ("self_attn.o_proj", (H, q), self.o_bias),
            *([("self_attn.out_norm", (H,), False)] if self.out_norms else []),
            ("post_attention_layernorm", (H,), False),
            ("mlp.gate_proj", (I, H), self.mlp_bias),
            ("mlp.up_proj", (I, H), self.mlp_bias),
            ("mlp.down_proj", (H, I), self.mlp_bias),
            *([("mlp.out_norm", (H,), False)] if self.out_norms else []),
        ]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, H)}
        for i, (name, shape, bias) in itertools.product(range(self.num_layers), layer):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
        shapes["model.norm.weight"] = (H,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, H)
        return shapes

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return tuple(self.rope if w is None else self.local_rope or self.rope for w in self.windows)

    @property
    def attention_scale(self) -> float:
        return (self.query_scalar or self.head_dim) ** -0.5

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of KV cache per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def cos_sin_table(rope: Rope, head_dim: int, max_len: int, device: torch.device | str) -> Tensor:
    """Return the table of `cos_sin` [max_len, D] float32, times the amplitude."""
    table = cos_sin(frequencies(rope, head_dim, max_len).to(device), max_len)
    if rope.amplitude != 1:
        table.unflatten(1, (2, -1))[..., : rope.rotated(head_dim) // 2] *= rope.amplitude
    return table


def frequencies(rope: Rope, head_dim: int, max_len: int) -> Tensor:
    """Return the rotation of each pair in radians per position, [D/2] float64, for up to `max_len` tokens."""
    rotated = rope.rotated(head_dim)
    base = rope.theta ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if rope.kind == "llama3":
        # Interpolate by the number of turns over the original context: keep = 0 is base / factor, 1 is base.
        turns = rope.original_max_len * base / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        base = base * (keep + (1 - keep) / rope.factor)
    elif rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_len else rope.short_factors
        base = base / torch.tensor(factors, dtype=torch.float64)
    else:
        base = base / rope.factor
    return torch.cat((base, base.new_zeros((head_dim - rotated) // 2)))
