"""The decoder for all model families, configured by `ModelConfig`.

    hidden = model.forward(batch, kv_cache)      T tokens -> [T, H], the hidden states
    logits = model.logits(hidden)                [N, H]   -> [N, V]

The model does not know about requests: `Batch` defines which tokens belong together, where their keys and
values are stored and what each token attends to, so one `forward` serves prefill, decoding and verification.
The model has no state except its weights; the caller owns the KV cache:

    kv_cache  [num_layers, 2, Hkv, num_blocks, block_size, D]      2: keys, values
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.layer.attention import attention
from ..kernels.layer.linear import Linear, make_linear
from ..kernels.layer.quantized import Quantized, concatenate
from ..kernels.layer.residual import Norm, Residual, embed, rms_norm
from ..kernels.layer.rope_cache import rope_cache
from ..kernels.native.packed import zeros_on_demand
from .config import ModelConfig, Rope, cos_sin_table

GetWeight = Callable[[str], Any]
"""Returns the tensor of a name in `ModelConfig.parameter_shapes` on the model's device: a Tensor in its
dtype, or a `Quantized` matrix."""

States = Sequence[tuple[int, Tensor]]
"""Pairs of a number of layers n and a tensor [T, H], which may be columns of a larger one, that `forward`
writes the residual stream after n layers to; 0 is the embedding."""


class Layer:
    """A decoder layer. The projections q, k, v are fused into one matrix, and so are gate and up."""

    def __init__(self, config: ModelConfig, index: int, get: GetWeight) -> None:
        """Load the weights of layer `index` with `get` and pack them."""

        def rows(kind: str, *names: str) -> Any:
            return concatenate([get(f"model.layers.{index}.{name}.{kind}") for name in names])

        def linear(has_bias: bool, *names: str) -> Linear:
            return make_linear(rows("weight", *names), rows("bias", *names) if has_bias else None)

        def norm(name: str) -> Norm:
            return Norm(rows("weight", name), config.rms_norm_eps)

        self.config, self.rope, self.window = config, config.ropes[index], config.windows[index]
        self.input_norm = norm("input_layernorm")
        self.qkv = linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qk_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
        self.o = linear(config.o_bias, "self_attn.o_proj")
        self.o_norm = norm("self_attn.out_norm") if config.out_norms else None
        self.post_norm = norm("post_attention_layernorm")
        self.gate_up = linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj")
        self.down = linear(config.mlp_bias, "mlp.down_proj")
        self.down_norm = norm("mlp.out_norm") if config.out_norms else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def __call__(
        self, residual: Residual, cache: Tensor, angles: Tensor, batch: Batch, next_norm: Norm
    ) -> Residual:
        """Run the layer on the residual stream x [T, H] with its cache [2, Hkv, num_blocks, block_size, D].

        x += o(attention(rope(qkv(input_norm(x))))), then x += down(gate(gate_up(post_norm(x)))). On a GPU the
        addition also computes what the next RMSNorm needs, so `next_norm` is the next layer's first norm.
        """
        c = self.config
        qkv = self.qkv.after_norm(residual)  # norm(x) @ W.T: [T, (Hq + 2 Hkv) * D]: q, k and v heads
        q = rope_cache(qkv, cache, batch, angles, self.qk_norms)  # [T, Hq, D]; k, v go to the cache
        out = attention(q, cache, batch, self.window, c.attention_scale, c.attention_softcap).flatten(1)
        residual = self.o.add_to(residual, out, self.post_norm, self.o_norm)  # x + o_norm(out @ W.T)
        h = self.gate_up.gated(residual, c.gate)  # silu(gate) * up of norm(x) @ W.T: [T, I]
        return self.down.add_to(residual, h, next_norm, self.down_norm)  # x + down_norm(h @ W.T)


class Model:
    """A decoder with its weights loaded; see the module docstring."""

    num_devices = 1  # devices that the weights are split across
    # [V, H], or this device's rows. The embedding is a Tensor, or an object with `rows(ids)` such as a
    # `Linear`; if tied, it shares memory with lm_head unless that is repacked.
    embedding: Any
    lm_head: Linear

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        get: GetWeight,
        vocabulary: "Model | None" = None,
    ) -> None:
        """Load each weight once with `get`: first the vocabulary, which is the largest, then layer by layer,
        so that little is in memory twice. With `vocabulary`, share the embedding and lm_head of that model,
        which do not count in `weight_bytes`."""
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.weight_bytes = 0  # of this device; shared memory counts once

        def tensor(name: str) -> Any:
            weight = get(name)
            if len(weight.shape) == 1:  # matrices count as they are packed
                self.weight_bytes += weight.nbytes
            return weight

        self.cos_sin = {
            rope: cos_sin_table(rope, config.head_dim, config.max_position_embeddings, self.device)
            for rope in set(config.ropes)
        }
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        if vocabulary is not None:
            self.embedding, self.lm_head = vocabulary.embedding, vocabulary.lm_head
        else:
            self._load_vocabulary(tensor)
        self.layers = [Layer(config, i, tensor) for i in range(config.num_layers)]
        self.norm = Norm(tensor("model.norm.weight"), config.rms_norm_eps)
        self.weight_bytes += sum(linear.nbytes for linear in self.linears[: -1 if vocabulary else None])

    def _load_vocabulary(self, get: GetWeight) -> None:
        """Load `embedding` and `lm_head`."""
        self.embedding, is_tied = get("model.embed_tokens.weight"), self.config.tie_word_embeddings
        self.lm_head = make_linear(self.embedding if is_tied else get("lm_head.weight"))
        if isinstance(self.embedding, Quantized):
            self.embedding = self.lm_head if is_tied else make_linear(self.embedding)
        if self.embedding is not self.lm_head and self.embedding is not self.lm_head.unpacked_weight:
            self.weight_bytes += self.embedding.nbytes

    @property
    def linears(self) -> list[Linear]:
        """The matrix products of a step; the last one is lm_head."""
        return [*(linear for layer in self.layers for linear in layer.linears), self.lm_head]

    def forward(self, batch: Batch, kv_cache: Tensor, states: States = ()) -> Tensor:
        """Return the hidden states [T, H] of a batch after the final norm, and write its keys and values to
        the cache. The hidden states of unused tokens are undefined."""
        angles = self.angles(batch)
        norms = [layer.input_norm for layer in self.layers] + [self.norm]
        residual = embed(batch.input_ids, self.embedding, norms[0], self.embedding_scale, batch.num_used)
        for n, (layer, cache, norm) in enumerate(zip(self.layers, kv_cache, norms[1:], strict=True)):
            _keep(residual, n, states)
            residual = layer(residual, cache, angles[layer.rope], batch, norm)
        _keep(residual, len(self.layers), states)
        return rms_norm(residual.x, self.norm)

    def write_kv(self, batch: Batch, kv_cache: Tensor, states: States = ()) -> None:
        """Only write the keys and values of a batch, and `states` (prefill); `cpu.py` skips the rest of the
        last layer."""
        self.forward(batch, kv_cache, states)

    def angles(self, batch: Batch) -> dict[Rope, Tensor]:
        """Return cos and sin of the RoPE angles of each token [T, D]."""
        return {rope: table.index_select(0, batch.positions) for rope, table in self.cos_sin.items()}

    def logits(self, hidden: Tensor, out: Tensor | None = None, num_used: Tensor | None = None) -> Tensor:
        """Return the logits of the next token from hidden states of `forward`: [N, H] -> [N, V], written to
        `out` if given. `num_used`: see `Batch`."""
        logits = self.lm_head(hidden, out, num_used)
        if (cap := self.config.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """Allocate a KV cache filled with zeros."""
        c = self.config
        shape = c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim
        return zeros_on_demand(shape, self.dtype, self.device)


def new_states(model: Model, num_tokens: int, layers: Sequence[int]) -> tuple[Tensor, States]:
    """Return an uninitialized tensor [T, n * H] for the hidden states after each of these numbers of layers,
    and its columns as an argument of `Model.forward`."""
    shape = num_tokens, len(layers), model.config.hidden_size
    whole = torch.empty(shape, dtype=model.dtype, device=model.device)
    return whole.flatten(1), list(zip(layers, whole.unbind(1), strict=True))


def _keep(residual: Residual, num_layers: int, states: States) -> None:
    for n, to in states:
        if n == num_layers:
            to.copy_(residual.x)
