"""`Model.forward` on a CPU as one call of `kernels/native/decoder.cpp`: what a CUDA graph is on a GPU.

The structures are those of decoder.cpp. They hold addresses; `CompiledDecoder` keeps the tensors alive.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int, c_long, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.layer.linear import Weight as LinearWeight
from ..kernels.layer.norm import Norm
from ..kernels.native.build import library
from ..kernels.native.packed import WIDTH, Packed, Weight

if TYPE_CHECKING:
    from .decoder import Layer, Model, Projection

MAX_GROUP, MAX_DIM = 64, 256  # query heads to a head of keys and values; numbers to a head


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        ("window", c_long),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_long) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        *((name, c_void_p) for name in ("embedding", "cos_sin")),
        ("norm", _Norm),
        ("layers", POINTER(_Layer)),
    )


class _Batch(Structure):
    _fields_ = (
        *((name, c_long) for name in ("tokens", "rows", "max_blocks")),
        *((name, c_void_p) for name in ("input_ids", "positions", "slots", "block_table")),
        *((name, c_void_p) for name in ("q_start", "q_len", "base_len", "ancestors")),
    )


class _Cache(Structure):
    _fields_ = (("data", c_void_p), ("num_blocks", c_long), ("block_size", c_long))


class CompiledDecoder:
    """Computes what `Model.forward` says."""

    def __init__(self, model: Model) -> None:
        c = model.config
        self._kept = model.layers, model.norm, model.embedding, model.cos_sin
        layers = (_Layer * c.num_layers)(*map(_layer, model.layers))
        self._model = _Model(
            c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size,
            model.embedding.data_ptr(), model.cos_sin.data_ptr(), _norm(model.norm), layers,
        )  # fmt: skip

    def __call__(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        T = batch.num_tokens
        ints = [tensor.int().contiguous() for tensor in self._ints(batch)]
        ancestors = None if batch.ancestors is None else batch.ancestors.contiguous()
        pointers = [tensor.data_ptr() for tensor in ints]
        pointers.append(0 if ancestors is None else ancestors.data_ptr())
        hidden = torch.empty(T, self._model.hidden, dtype=torch.bfloat16)
        found = library()
        assert found is not None
        found.nanospec_forward(
            byref(self._model),
            byref(_Batch(T, batch.num_rows, batch.block_table.shape[1], *pointers)),
            byref(_Cache(kv_cache.data_ptr(), *kv_cache.shape[3:5])),
            c_void_p(hidden.data_ptr()),
            c_int(torch.get_num_threads()),
        )
        return hidden

    @staticmethod
    def _ints(b: Batch) -> tuple[Tensor, ...]:
        return b.input_ids, b.positions, b.slots, b.block_table, b.q_start, b.q_len, b.base_len


def compiled_decoder(model: Model) -> CompiledDecoder | None:
    """The compiled forward pass of a model whose weights are packed for it and whose shape it can take."""
    c = model.config
    packed = all(isinstance(w, Packed) for layer in model.layers for w in _weights(layer))
    fits = c.num_heads // c.num_kv_heads <= MAX_GROUP and c.head_dim <= MAX_DIM and c.head_dim % 2 == 0
    return CompiledDecoder(model) if packed and fits and c.intermediate_size % WIDTH == 0 else None


def _weights(layer: Layer) -> list[LinearWeight]:
    return [projection.weight for projection in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def _layer(layer: Layer) -> _Layer:
    norms = layer.input_norm, *(layer.qk_norms or (None, None)), layer.post_norm
    weights = layer.qkv, layer.o, layer.gate_up, layer.down
    return _Layer(*map(_norm, norms), *map(_weight, weights), layer.window or 0)


def _norm(norm: Norm | None) -> _Norm:
    return _Norm(0, 0.0) if norm is None else _Norm(norm.weight.data_ptr(), norm.eps)


def _weight(projection: Projection) -> Weight:
    assert isinstance(projection.weight, Packed)
    return projection.weight.struct(projection.bias)
