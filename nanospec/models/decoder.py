"""One decoder for all families of models, driven by `ModelConfig`.

    hidden = model.forward(batch, kv_cache)      T tokens -> [T, H]
    logits = model.logits(hidden)                [N, H]   -> [N, V]

The model knows nothing of requests: `Batch` says which tokens belong together, where their keys and values
go and what each may see, so one `forward` serves prefill, decoding and verification. Besides the weights it
has no state; the KV cache belongs to the caller:

    kv_cache  [num_layers, 2, Hkv, num_blocks, block_size, D]      2: keys, values

`cpu.py` has the same model as one call of C++, with a cache in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.launch import use_triton
from ..kernels.layer.attention import AttentionMetadata, attention
from ..kernels.layer.linear import Linear, make_linear
from ..kernels.layer.rope_cache import rope_cache
from ..kernels.layer.stream import Norm, Stream, embed, rms_norm
from ..kernels.native.packed import zeros_on_demand
from .config import ModelConfig, cos_sin_table

GetWeight = Callable[[str], Tensor]
"""Returns a tensor of `ModelConfig.parameter_shapes` by name, in the model's dtype, on its device."""


class Layer:
    """One layer. Weights that are used together are one: rows of q, k, v; rows of gate, up."""

    def __init__(self, config: ModelConfig, index: int, get: GetWeight) -> None:
        """Take the weights of layer `index` from `get`, and pack them."""

        def rows(kind: str, *names: str) -> Tensor:
            parts = [get(f"model.layers.{index}.{name}.{kind}") for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

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

    def __call__(
        self, stream: Stream, cache: Tensor, angles: Tensor, metadata: AttentionMetadata, norm: Norm
    ) -> Stream:
        """Run the residual stream x [T, H] through the layer; cache [2, Hkv, num_blocks, block_size, D].

        x += o(attention(rope(qkv(input_norm(x))))), then x += down(gate(gate_up(post_norm(x)))). On a GPU the
        addition also computes what the next RMSNorm needs, so each layer is given the next one's `norm`.
        """
        c = self.config
        qkv = self.qkv.of_norm(stream)  # norm(x) @ W.T: [T, (Hq + 2 Hkv) * D], all q heads, all k heads, v
        q = rope_cache(qkv, cache, metadata.batch, angles, self.qk_norms)  # [T, Hq, D]; k, v go to the cache
        out = attention(q, cache, metadata, c.attention_scale, c.attention_softcap).flatten(1)  # [T, Hq * D]
        stream = self.o.add_to(stream, out, self.post_norm, self.o_norm)  # x + o_norm(out @ W.T)
        h = self.gate_up.gated(stream, c.gate)  # silu(gate) * up of norm(x) @ W.T: [T, I]
        return self.down.add_to(stream, h, norm, self.down_norm)  # x + down_norm(h @ W.T)


class Model:
    """A decoder with its weights in place; see the module docstring.

    Attributes:
        num_devices: among how many devices its weights are split.
        embedding, lm_head: [V, H], or this device's rows; one tensor on a GPU if they are tied.
        norm: the final one.
        cos_sin: [max_position_embeddings, D] float32, the angles of each RoPE that a layer has.
        weight_bytes: of this device's weights, tied ones once unless one of the two is packed.
    """

    num_devices = 1

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, get: GetWeight
    ) -> None:
        """Take the weights from `get`, in the order of the forward pass, each exactly once. Layers are packed
        one by one, so that no more than one layer exists twice at any time."""
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.weight_bytes = 0

        def tensor(name: str) -> Tensor:
            weight = get(name)
            self.weight_bytes += weight.nbytes
            return weight

        self.cos_sin = {
            rope: cos_sin_table(rope, config.head_dim, config.max_position_embeddings, self.device)
            for rope in set(config.ropes)
        }
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        self.embedding = tensor("model.embed_tokens.weight")
        self.layers = [Layer(config, i, tensor) for i in range(config.num_layers)]
        self.norm = Norm(tensor("model.norm.weight"), config.rms_norm_eps)
        is_tied = config.tie_word_embeddings
        self.lm_head = make_linear(self.embedding if is_tied else tensor("lm_head.weight"))
        if is_tied and self.lm_head.rows is None:
            self.weight_bytes += self.lm_head.num_bytes

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        """Return the hidden states [T, H] of a batch after the final norm (of padding tokens, anything), and
        write its keys and values to the cache. Ids of padding tokens must lie in the vocabulary."""
        angles = {rope: table.index_select(0, batch.positions) for rope, table in self.cos_sin.items()}
        metadata = {w: AttentionMetadata(batch, w) for w in set(self.config.windows)}
        norms = [layer.input_norm for layer in self.layers] + [self.norm]
        stream = embed(batch.input_ids, self.embedding, norms[0], self.embedding_scale)
        for layer, cache, norm in zip(self.layers, kv_cache, norms[1:], strict=True):
            stream = layer(stream, cache, angles[layer.rope], metadata[layer.window], norm)
        return rms_norm(stream.x, self.norm)

    def write_kv(self, batch: Batch, kv_cache: Tensor) -> None:
        """Run the decoder for the keys and values alone (prefill); `cpu.py` stops after the last ones."""
        self.forward(batch, kv_cache)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the scores of the next token for rows of `forward`'s result: [N, H] -> [N, V], in `out` if
        it is given."""
        logits = self.lm_head(hidden, out)
        if (cap := self.config.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def empty_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """Allocate a KV cache, all zeros."""
        c = self.config
        shape = c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim
        return zeros_on_demand(shape, self.dtype, self.device)

    def zero_blocks(self, kv_cache: Tensor, blocks: Sequence[int]) -> None:
        """Zero blocks that get a new owner, for `naive` attention: it multiplies masked values by 0, and NaN
        stays NaN."""
        if not use_triton(kv_cache):
            kv_cache[:, :, :, list(blocks)] = 0
