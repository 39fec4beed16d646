"""Describe the shape of a decoder: one frozen `ModelConfig` for all families of models.

Everything that `decoder.py` can vary is a field, so that no other file depends on the family. `families/`
translates each family's `config.json` into it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..text.checks import shown
from .rope import Rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder.

    Attributes:
        qkv_bias, o_bias, mlp_bias: whether the projections (mlp: all three) have a bias.
        qk_norm: RMSNorm over each head of q and k before the rotation.
        out_norms: RMSNorm of what attention and the MLP give, before it is added to the residual stream.
        gate: the function of the MLP's gate; "gelu" is its approximation by tanh.
        windows: one per layer; w lets a token see itself and the w - 1 before it, None all of them.
        local_rope: of layers with a window, if it is not `rope`.
        query_scalar: q . k is divided by its root; None: by that of `head_dim`.
        attention_softcap, logit_softcap: c makes c * tanh(x / c) of scores x before softmax, of the logits.
        embedding_scale: factor of the embeddings, rounded to the dtype of the computation as they are.
        tie_word_embeddings: the output head is the embedding table.
        dtype: "float32", "bfloat16" or "float16", what the checkpoint says it is stored in.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    out_norms: bool = False
    gate: Literal["silu", "gelu"] = "silu"
    query_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        heads, kv, rotated = self.num_heads, self.num_kv_heads, self.rope.rotated(self.head_dim)
        if heads % kv:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, as RoPE rotates pairs.")
        if rotated % 2:
            raise ValueError(f"partial_rotary_factor={self.rope.part} of {self.head_dim} must be even.")
        factors = {len(self.rope.short_factors), len(self.rope.long_factors)}
        if self.rope.kind == "longrope" and factors != {rotated // 2}:
            raise ValueError(f"longrope needs a short and a long factor for each of {rotated // 2} pairs.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={shown(self.dtype)} is not one of {', '.join(DTYPES)}.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name, in order of use. Names are those of Llama's checkpoints;
        `families/` maps others to them. Norms multiply by their weight as it is."""
        H, I, D = self.hidden_size, self.intermediate_size, self.head_dim  # noqa: E741
        q, kv = self.num_heads * D, self.num_kv_heads * D
        head_norms = [("self_attn.q_norm", (D,), False), ("self_attn.k_norm", (D,), False)]
        layer: list[tuple[str, tuple[int, ...], bool]] = [  # name, shape of the weight, has a bias
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
        """RoPE of each layer."""
        return tuple(self.rope if w is None else self.local_rope or self.rope for w in self.windows)

    @property
    def attention_scale(self) -> float:
        """Factor of q . k."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding table counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
