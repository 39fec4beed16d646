"""`Model.forward` on a CPU as one call of `kernels/native/decoder.cpp`: what a CUDA graph is on a GPU."""

from __future__ import annotations

import itertools
import struct
from array import array
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.dispatch import use_triton
from ..kernels.layer.norm import Norm
from ..kernels.layer.vocab_parallel import Vocabulary
from ..kernels.native.build import target
from ..kernels.native.call import Word, batch_words, call, words
from ..kernels.native.packed import WIDTH, Packed, empty_rows, row_words
from ..kernels.native.tiles import cache_words

if TYPE_CHECKING:
    from .decoder import Layer, Model

LANES = 16  # numbers to a vector
MAX_GROUP = 64  # query heads to a head of keys and values; as attention.h has it
MIN_DIM, MAX_DIM = 32, 256  # numbers to a head


class CompiledDecoder:
    """Computes what `Model.forward` says. Holds addresses of the model's tensors: must not outlive it."""

    def __init__(self, model: Model) -> None:
        c = model.config
        self._hidden_size = c.hidden_size
        self._norms: list[Tensor] = []
        self._layers = words(*(word for layer in model.layers for word in self._layer_words(model, layer)))
        scalar, cap = c.query_scalar or c.head_dim, c.attention_softcap or 0
        self._model = words(
            c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size,
            *map(_double, (c.rms_norm_eps, scalar, cap, model.embedding_scale)), c.gate == "gelu",
            model.embedding, self._norm(model.norm), _address(self._layers),
        )  # fmt: skip

    def __call__(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        hidden = empty_rows(batch.num_tokens, self._hidden_size)
        self._run(batch, kv_cache, hidden)
        return hidden

    def write_kv(self, batch: Batch, kv_cache: Tensor) -> None:
        """The same without its result: the last layer ends with its keys and values."""
        self._run(batch, kv_cache, None)

    def _layer_words(self, model: Model, layer: Layer) -> tuple[Word, ...]:
        """`Layer` of structs.h."""
        qk = layer.qk_norms or (None, None)
        norms = layer.input_norm, *qk, layer.o_norm, layer.post_norm, layer.down_norm
        weights = [p.weight.words(p.bias) for p in layer.projections if isinstance(p.weight, Packed)]
        cos_sin = model.cos_sin if layer.window is None else model.local_cos_sin
        return *map(self._norm, norms), *itertools.chain(*weights), layer.window, cos_sin

    def _norm(self, norm: Norm | None) -> Tensor | None:
        """`Norm` of structs.h."""
        if norm is None:
            return None
        self._norms.append(F.pad(norm.weight.float(), (0, -len(norm.weight) % LANES)))
        return self._norms[-1]

    def _run(self, batch: Batch, kv_cache: Tensor, hidden: Tensor | None) -> None:
        call(
            "nanospec_forward", _address(self._model), *batch_words(batch), *cache_words(kv_cache),
            *row_words(hidden), torch.get_num_threads(),
        )  # fmt: skip


def compiled_decoder(model: Model) -> CompiledDecoder | None:
    """The compiled forward pass of a model whose weights are packed for it and whose shape it can take."""
    c = model.config
    packed = all(isinstance(p.weight, Packed) for layer in model.layers for p in layer.projections)
    heads = c.num_heads // c.num_kv_heads <= MAX_GROUP and MIN_DIM <= c.head_dim <= MAX_DIM
    fits = heads and c.head_dim % 2 == 0 and c.intermediate_size % WIDTH == 0
    return CompiledDecoder(model) if packed and fits else None


def computed_by(model: Model) -> str:
    """Whose code the forward pass of a model on this machine is, in words."""
    if use_triton(model.like):
        return "Triton"
    head = model.lm_head.part if isinstance(model.lm_head, Vocabulary) else model.lm_head
    if not isinstance(head, Packed):
        return "PyTorch"
    return ("C++" if model.runs_compiled else "PyTorch, products in C++") + f" ({target()})"


def _double(number: float) -> int:
    """The word of a double."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _address(found: array[int]) -> int:
    return found.buffer_info()[0]
