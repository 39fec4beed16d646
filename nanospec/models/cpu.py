"""The model in bfloat16 on CPUs: `kernels/native/decoder.cpp` runs the whole forward pass in one call."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.launch import use_native, use_triton
from ..kernels.layer.linear import NativeLinear
from ..kernels.layer.residual import Norm
from ..kernels.native import NativeArg, call, packed, target, words
from .config import ModelConfig
from .decoder import GetWeight, Layer, Model, States

LANES = 16  # float32 values per vector
MAX_GROUP = 64  # query heads per KV head, as in attention.h
MIN_DIM, MAX_DIM = 32, 256  # supported head dimensions


class CompiledModel(Model):
    """A bfloat16 model on a CPU; weights and KV cache have the layouts of `kernels/native/packed.py`.

    C++ gets the addresses of the tensors as 64-bit words, so the tensors must stay alive and in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        get: GetWeight,
        vocabulary: Model | None = None,
    ) -> None:
        super().__init__(config, dtype, device, get, vocabulary)
        c, scalar = config, config.query_scalar or config.head_dim
        self._norms: list[Tensor] = []
        table, shape = self.embedding, (c.vocab_size, c.hidden_size)
        embedding = packed.Packed(table, shape) if isinstance(table, Tensor) else table.weight
        self._layers = words(*(word for layer in self.layers for word in self._layer_words(layer)))
        self._model = words(
            c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size,
            *map(packed.double, (c.rms_norm_eps, scalar, c.attention_softcap or 0, self.embedding_scale)),
            c.gate == "gelu", *embedding.words(), self._norm(self.norm), self._layers.buffer_info()[0],
        )  # fmt: skip

    def forward(self, batch: Batch, kv_cache: Tensor, states: States = ()) -> Tensor:
        hidden = packed.empty_rows(batch.num_tokens, self.config.hidden_size)
        self._run(batch, kv_cache, hidden, states)
        return hidden

    def write_kv(self, batch: Batch, kv_cache: Tensor, states: States = ()) -> None:
        if any(n == self.config.num_layers for n, _ in states):
            self.forward(batch, kv_cache, states)
        else:  # without an output, the last layer stops after its keys and values
            self._run(batch, kv_cache, None, states)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """Allocate a KV cache of zeros, in which each block is contiguous, on large memory pages."""
        c = self.config
        shape = packed.tiled_shape(num_blocks, c.num_layers, c.num_kv_heads, block_size, c.head_dim)
        return packed.zeros_on_demand(shape, self.dtype, large_pages=True)

    def words(self, kv_cache: Tensor) -> tuple[NativeArg, ...]:
        """Return this model and a KV cache of it as the first arguments of C++ functions."""
        return self._model.buffer_info()[0], *packed.cache_words(kv_cache)

    def _run(self, batch: Batch, kv_cache: Tensor, hidden: Tensor | None, states: States) -> None:
        kept = words(*(word for n, rows in states for word in (n, *packed.row_words(rows))))
        call(
            "nanospec_forward", *self.words(kv_cache), *batch.native_args, *packed.row_words(hidden),
            kept.buffer_info()[0], len(states), torch.get_num_threads(),
        )  # fmt: skip

    def _layer_words(self, layer: Layer) -> tuple[NativeArg, ...]:
        """Return the words of the struct `Layer` of structs.h."""
        q_norm, k_norm = layer.qk_norms or (None, None)
        norms = layer.input_norm, q_norm, k_norm, layer.o_norm, layer.post_norm, layer.down_norm
        weights: list[NativeArg] = []
        for linear in layer.linears:
            weights += linear.weight.words(linear.bias)
        return *map(self._norm, norms), *weights, layer.window, self.cos_sin[layer.rope]

    def _norm(self, norm: Norm | None) -> Tensor | None:
        """Return `padded_norm` of a norm, which this model keeps."""
        if norm is None:
            return None
        self._norms.append(padded_norm(norm))
        return self._norms[-1]


def padded_norm(norm: Norm) -> Tensor:
    """Return the weight of a norm in float32, padded to whole vectors, for structs.h."""
    return F.pad(norm.weight.float(), (0, -len(norm.weight) % LANES))


def model_class(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> type[Model]:
    """Return `CompiledModel` if C++ supports this shape, dtype and device, else `Model`."""
    c = config
    heads = c.num_heads // c.num_kv_heads <= MAX_GROUP and MIN_DIM <= c.head_dim <= MAX_DIM
    fits = heads and c.hidden_size % 2 == 0 and c.intermediate_size % packed.WIDTH == 0
    return CompiledModel if fits and use_native(torch.empty(0, dtype=dtype, device=device)) else Model


def computed_by(model: Model) -> str:
    """Return the name of the implementation that computes the forward pass, for reports."""
    if use_triton(model.norm.weight):
        return "Triton"
    if isinstance(model, CompiledModel):
        return f"C++ ({target()})"
    return f"PyTorch, products in C++ ({target()})" if isinstance(model.lm_head, NativeLinear) else "PyTorch"
