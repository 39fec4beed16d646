"""One decoder for all families of models, driven by `ModelConfig`.

    hidden = model.forward(batch, kv_cache)      T tokens -> [T, H]
    logits = model.logits(hidden)                [N, H]   -> [N, V]

The model knows nothing of requests: `Batch` says which tokens belong together, where their keys and
values go and what each may see, so one `forward` serves prefill, decoding and verification. It has
no state of its own besides the weights; the KV cache belongs to the caller:

    kv_cache  [num_layers, 2, Hkv, num_blocks, block_size, D]      2: keys, values

or, where `forward` is one compiled call, as `kernels/native/tiles.py` lays it out (`memory.kv_shape`).

Weights used together lie together (rows of q, k, v; rows of gate, up), in `linear.pack`'s layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.dispatch import use_native
from ..kernels.layer.attention import attention
from ..kernels.layer.linear import Weight, linear, linear_add, norm_swiglu, num_bytes, pack
from ..kernels.layer.norm import Norm, rms_norm
from ..kernels.layer.plan import Plan
from ..kernels.layer.qkv_rope import qkv_rope
from ..kernels.layer.rope_cache import Angles
from ..kernels.layer.stream import Stream, embed
from ..kernels.layer.vocab_parallel import Vocabulary
from ..kernels.native.tiles import is_tiled
from .compiled import CompiledDecoder, compiled_decoder
from .config import ModelConfig
from .random_weights import random_weights
from .rope import cos_sin_table

GetWeight = Callable[[str], Tensor]
"""Gives a tensor of `ModelConfig.parameter_shapes` by name, in the model's dtype, on its device."""


class Projection(NamedTuple):
    """weight [out, in], possibly packed, and bias [out]."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer.

    Attributes:
        o_norm, down_norm: of what attention and the MLP give, if there are any.
        qkv: to (Hq + 2 Hkv) * D, with all q heads first, then all k heads, then all v heads.
        gate_up: to 2 I, gate first.
        window: sliding window in tokens, None for none.
    """

    input_norm: Norm
    qkv: Projection
    qk_norms: tuple[Norm, Norm] | None
    o: Projection
    o_norm: Norm | None
    post_norm: Norm
    gate_up: Projection
    down: Projection
    down_norm: Norm | None
    window: int | None

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Of hidden states; those that exist."""
        found = self.input_norm, self.o_norm, self.post_norm, self.down_norm
        return tuple(norm for norm in found if norm is not None)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class Model:
    """A decoder with its weights in place; see the module docstring.

    Attributes:
        num_ranks: among how many processes its weights are split.
        config, dtype, device: as given; `like` is an empty tensor of these two.
        embedding: [V, H], or the rank's part of it, as may be lm_head and `Layer`'s (`shard.py`).
        layers: one `Layer` each.
        norm: the final one.
        lm_head: [V, H], possibly packed; on a GPU the embedding itself where the two are tied.
        cos_sin: [max_position_embeddings, D] float32; positions must be below its length.
        local_cos_sin: that of layers with a window, mostly the same.
        embedding_scale: factor of the embeddings.
    """

    num_ranks = 1

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, get: GetWeight
    ) -> None:
        """Take the weights from `get`, in the order of the forward pass, each exactly once.

        Layers are packed one by one, so that no more than one layer exists twice at any time.
        """
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        max_len = config.max_position_embeddings
        self.cos_sin = self.local_cos_sin = cos_sin_table(config.rope, config.head_dim, max_len, self.device)
        if config.local_rope is not None:
            self.local_cos_sin = cos_sin_table(config.local_rope, config.head_dim, max_len, self.device)
        self.like = torch.empty(0, dtype=dtype, device=self.device)
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        self._scores = config.attention_scale, config.attention_softcap
        self.embedding = get("model.embed_tokens.weight")
        self.layers = [_layer(config, i, get) for i in range(config.num_layers)]
        self.norm = Norm(get("model.norm.weight"), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head: Weight = pack(self.embedding if tied else get("lm_head.weight"))

    @cached_property
    def _compiled(self) -> CompiledDecoder | None:
        """Made when first needed, which is when all weights are in place."""
        return compiled_decoder(self)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Model:
        """A model with random weights, for tests and benchmarks: see `random_weights.py`."""
        return cls(config, dtype, device, random_weights(config, dtype, device, seed))

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        """Run the decoder over a batch and write its keys and values to the cache.

        Args:
            batch: input ids in 0 .. V - 1, also those of padding tokens; positions below
                `max_position_embeddings`.
            kv_cache: in the model's dtype. Entries that no query sees may hold anything finite.

        Returns:
            [T, H] after the final norm. Padding tokens get unspecified values.
        """
        if self._compiled and is_tiled(kv_cache):
            return self._compiled(batch, kv_cache)
        config = self.config
        angles = local = Angles(self.cos_sin, batch.positions, self.dtype)
        if config.local_rope is not None:
            local = Angles(self.local_cos_sin, batch.positions, self.dtype)
        plans = {w: Plan(batch, config.num_heads, kv_cache[0], w) for w in set(config.windows)}
        norms = [layer.input_norm for layer in self.layers] + [self.norm]
        stream = embed(batch.input_ids, self.embedding, norms[0], self.embedding_scale)
        for layer, cache, norm in zip(self.layers, kv_cache, norms[1:], strict=True):
            turns = angles if layer.window is None else local
            stream = self._layer_forward(layer, stream, cache, turns, plans[layer.window], norm)
        return rms_norm(stream.x, self.norm)

    def write_kv(self, batch: Batch, kv_cache: Tensor) -> None:
        """`forward` for the sake of the cache alone: what prefill needs."""
        if self._compiled and is_tiled(kv_cache):
            self._compiled.write_kv(batch, kv_cache)
        else:
            self.forward(batch, kv_cache)

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory: this rank's."""
        norms = [n for layer in self.layers for n in (*layer.norms, *(layer.qk_norms or ()))]
        projections = [p for layer in self.layers for p in layer.projections]
        weights = [self.embedding, self.lm_head, *(p.weight for p in projections)]
        weights += [norm.weight for norm in (*norms, self.norm)]
        weights += [p.bias for p in projections if p.bias is not None]
        return sum({id(w.part if isinstance(w, Vocabulary) else w): num_bytes(w) for w in weights}.values())

    @property
    def runs_compiled(self) -> bool:
        """Whether `forward` is one compiled call, given a cache in tiles."""
        return self._compiled is not None and use_native(self.like)

    def _layer_forward(
        self, layer: Layer, stream: Stream, cache: Tensor, angles: Angles, plan: Plan, norm: Norm
    ) -> Stream:
        """The residual stream x [T, H] through one layer; cache [2, Hkv, num_blocks, block_size, D].

        A stream carries the norm that reads it next; `norm` is the one after this layer.
        """
        q = qkv_rope(stream, *layer.qkv, cache, plan.batch, angles, layer.qk_norms)
        out = attention(q, cache, plan, *self._scores)  # [T, Hq, D]
        out = out.flatten(1)
        stream = linear_add(out, layer.o.weight, stream, layer.post_norm, layer.o.bias, layer.o_norm)
        h = norm_swiglu(stream, *layer.gate_up, self.config.gate)  # [T, I]
        return linear_add(h, layer.down.weight, stream, norm, layer.down.bias, layer.down_norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None, head: Weight | None = None) -> Tensor:
        """Scores of the next token for rows of `forward`'s result: [N, H] -> [N, V], `out` if it is given.
        `head`: a part of the lm_head, for the scores of its tokens."""
        logits = linear(hidden, self.lm_head if head is None else head, out=out)
        if (cap := self.config.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _layer(config: ModelConfig, index: int, get: GetWeight) -> Layer:
    def tensor(kind: str, *names: str) -> Tensor:
        parts = [get(f"model.layers.{index}.{name}.{kind}") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def projection(has_bias: bool, *names: str) -> Projection:
        return Projection(pack(tensor("weight", *names)), tensor("bias", *names) if has_bias else None)

    def norm(name: str) -> Norm:
        return Norm(tensor("weight", name), config.rms_norm_eps)

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=projection(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None,
        o=projection(config.o_bias, "self_attn.o_proj"),
        o_norm=norm("self_attn.out_norm") if config.out_norms else None,
        post_norm=norm("post_attention_layernorm"),
        gate_up=projection(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=projection(config.mlp_bias, "mlp.down_proj"),
        down_norm=norm("mlp.out_norm") if config.out_norms else None,
        window=config.windows[index],
    )
