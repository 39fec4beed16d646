"""Which part of a model each rank has.

    q, k, v, the KV cache   by heads of keys and values, with the heads of queries that read them
    gate, up                rows
    o, down                 columns: each rank has a summand of every number, which `linear_add` adds up
    embedding, lm_head      rows, by tokens
    biases of o and down    rank 0; the others have zeros
    norms                   all of it

All ranks have the same shapes, hence the same memory and work. Heads of keys and values that do not divide
are filled up with zeros; where there are fewer than ranks, several ranks keep a copy of one and share its
queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.layer.vocab_parallel import Summed, Vocabulary
from ...models.config import ModelConfig
from ...models.decoder import Layer, Model, Projection
from .group import Group

UNIT = 16  # of the MLP's inner numbers, and of tokens: whole vectors of all products


@dataclass(frozen=True)
class Part:
    """`size` places from `first` on of dimension `dim`, of which those that the tensor lacks are zeros."""

    dim: int
    first: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view, without the zeros."""
        whole = tensor.shape[self.dim]
        first = min(self.first, whole)
        return tensor.narrow(self.dim, first, min(self.size, whole - first))

    def filled(self, part: Tensor) -> Tensor:
        """With the zeros."""
        missing = self.size - part.shape[self.dim]
        behind = (0, 0) * (part.dim() - 1 - self.dim)
        return F.pad(part, (*behind, 0, missing)) if missing else part


class Shard:
    """The part of one rank.

    Attributes:
        config: the model as the rank computes it: with its own heads and inner numbers.
    """

    def __init__(self, whole: ModelConfig, group: Group) -> None:
        """ValueError if the model cannot be split among so many ranks."""
        check_split(whole, group.size)
        self.whole, self.group = whole, group
        heads, kv = local_heads(whole, group.size)
        inner = _share(whole.intermediate_size, group.size, UNIT)
        self.config = replace(whole, num_heads=heads, num_kv_heads=kv, intermediate_size=inner)

    def part(self, name: str) -> Part | None:
        """What the rank has of a tensor of `ModelConfig.parameter_shapes`; None: all of it."""
        c, rank = self.config, self.group.rank
        what = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        queries = Part(0, self._first_head * c.head_dim, c.num_heads * c.head_dim)
        keys = Part(0, self._first_kv_head * c.head_dim, c.num_kv_heads * c.head_dim)
        inner = Part(0, rank * c.intermediate_size, c.intermediate_size)
        tokens = Part(0, rank * self.num_tokens, self.num_tokens)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": inner, "up_proj": inner}
        parts |= {"embed_tokens": tokens, "lm_head": tokens}
        if name.endswith("weight"):
            parts |= {"o_proj": replace(queries, dim=1), "down_proj": replace(inner, dim=1)}
        return parts.get(what)

    @property
    def num_tokens(self) -> int:
        """Rows of the vocabulary; in whole units if that leaves some for every rank."""
        return _tokens(self.whole, self.group.size)

    @property
    def _copies(self) -> int:
        """Ranks that keep the same heads of keys and values."""
        return max(self.group.size // self.whole.num_kv_heads, 1)

    @property
    def _first_kv_head(self) -> int:
        return self.group.rank // self._copies * self.config.num_kv_heads

    @property
    def _first_head(self) -> int:
        """Ranks with the same head of keys and values share its queries in their order."""
        group = self.whole.num_heads // self.whole.num_kv_heads
        return self._first_kv_head * group + self.group.rank % self._copies * self.config.num_heads

    def joined(self, model: Model) -> Model:
        """The model of this rank's weights, made one with the others'."""
        gather, first, size = self.group.gather, self.group.rank * self.num_tokens, self.whole.vocab_size
        model.layers = [self._joined_layer(layer) for layer in model.layers]
        model.embedding = Vocabulary(model.embedding, gather, first, size)  # type: ignore[assignment]
        model.lm_head = Vocabulary(model.lm_head, gather, first, size)
        model.num_ranks = self.group.size
        return model

    def _joined_layer(self, layer: Layer) -> Layer:
        def summed(projection: Projection) -> Projection:
            group, (weight, bias) = self.group, projection
            if bias is not None and group.rank:
                bias = torch.zeros_like(bias)  # added once
            return Projection(Summed(weight, group.gather, group.exchange, group.size), bias)

        return replace(layer, o=summed(layer.o), down=summed(layer.down))


def local_heads(whole: ModelConfig, size: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of each of `size` ranks."""
    group = whole.num_heads // whole.num_kv_heads
    if size <= whole.num_kv_heads:
        kv = _share(whole.num_kv_heads, size)
        return kv * group, kv
    return whole.num_heads // size, 1


def check_split(whole: ModelConfig, size: int) -> None:
    """ValueError unless every rank gets heads that others do not have, and tokens."""
    if (size - 1) * _tokens(whole, size) >= whole.vocab_size:
        raise ValueError(f"tensor_parallel_size={size} is too much for {whole.vocab_size} tokens; lower it.")
    fits = [n for n in range(1, whole.num_heads + 1) if _all_have_heads(whole, n)]
    if size not in fits:
        raise ValueError(
            f"tensor_parallel_size={size} cannot divide {whole.num_heads} attention heads with "
            f"{whole.num_kv_heads} of keys and values; use one of {', '.join(map(str, fits))}."
        )


def _all_have_heads(whole: ModelConfig, size: int) -> bool:
    if size <= whole.num_kv_heads:
        return (size - 1) * _share(whole.num_kv_heads, size) < whole.num_kv_heads
    return size % whole.num_kv_heads == 0 and whole.num_heads % size == 0


def _tokens(whole: ModelConfig, size: int) -> int:
    return _share(whole.vocab_size, size, UNIT if UNIT * size**2 <= whole.vocab_size else 1)


def _share(count: int, size: int, unit: int = 1) -> int:
    """What each of `size` ranks gets of so many, rounded up to whole units."""
    return -(-count // (size * unit)) * unit
