"""Which part of a model each rank has.

    q, k, v, the KV cache   heads of keys and values, with the heads of queries that read them
    gate, up                rows
    o, down                 columns: each rank has a summand of every number, which `Summed` adds up
    embedding, lm_head      rows, by tokens
    biases of o and down    rank 0; the others have zeros
    norms                   all of it

Ranks only gather numbers and add them in the order of ranks, so all compute the same bits. (A library's
all-reduce adds in an order that depends on the size of the message, so bits would depend on the batch.)

All ranks have the same shapes, hence the same memory and work. Heads of keys and values that do not divide
are filled up with zeros; where there are fewer than ranks, several ranks keep a copy of one and share its
queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.layer.linear import Linear
from ...kernels.layer.stream import Norm, Stream, residual_add, total
from ...models.config import ModelConfig
from ...models.decoder import Model
from .group import Group

# What a GPU receives from the other ranks (370 GB/s) in the 20 us or so that slices cost beside their bytes:
# one more exchange (10 us), and starts of kernels that add (one a rank and two or three, 1.3 us each).
EXCHANGE = 7_400_000  # bytes
UNIT = 16  # of the MLP's inner numbers, and of tokens: whole vectors of all products


class Summed(Linear):
    """A product of which every rank has a summand, by its `part` [N, K / ranks] of the weight. Of the bias
    one rank has all, and the others zeros."""

    def __init__(self, part: Linear, group: Group) -> None:
        super().__init__(part.weight, part.bias)
        self.part, self.group = part, group

    def add_to(self, stream: Stream, x: Tensor, norm: Norm, own: Norm | None = None) -> Stream:
        """Add this rank's summand [T, H] and the others', in order in float32, and round.

        Gathered, a rank receives ranks - 1 summands. Where that takes longer, each rank adds some rows for
        all, and receives 2 (ranks - 1) / ranks, as in a ring, in two exchanges. The bits are the same.
        """
        product, n = self.part(x), self.group.size
        T, H = product.shape
        if product.nbytes * (n - 1) * (n - 2) <= n * EXCHANGE:
            summands = self.group.gather(product)  # [ranks, T, H]
        else:
            slices = F.pad(product, (0, 0, 0, -T % n)).view(n, -1, H)
            summands = self.group.gather(total(self.group.exchange(slices))).view(1, -1, H)[:, :T]
        return residual_add(summands, stream.x, norm, own)


class Vocabulary(Linear):
    """The lm_head [V, H], of which every rank has a `part` of ceil(V / ranks) rows or more; `size` is V."""

    def __init__(self, part: Linear, group: Group, size: int) -> None:
        super().__init__(part.weight)
        self.part, self.group, self.size = part, group, size

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [T, V] of all ranks' tokens."""
        columns = self.group.gather(self.part(x))  # [ranks, T, len(part)]
        logits = columns.transpose(0, 1).flatten(1)[:, : self.size]
        return logits.contiguous() if out is None else out.copy_(logits)


@dataclass(frozen=True)
class Embedding:
    """The embedding [V, H], of which every rank has a `part`: the rows from `first` on."""

    part: Tensor
    group: Group
    first: int

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows [T, H] of ids [T]: those of one rank, to which the others add zeros."""
        mine = (ids >= self.first) & (ids < self.first + len(self.part))
        rows = F.embedding(torch.where(mine, ids - self.first, 0), self.part)
        return self.group.gather(rows.masked_fill(~mine[:, None], 0)).sum(0)


class Shard:
    """The part of one rank, a `models.weights.Split`.

    Attributes:
        config: the model as the rank computes it: with its own heads and inner numbers.
        num_tokens: rows of the vocabulary.
    """

    def __init__(self, whole: ModelConfig, group: Group) -> None:
        """Raises ValueError if the model cannot be split among so many ranks."""
        size, rank = group.size, group.rank
        check_split(whole, size)
        self.group, self.vocab_size, self.num_tokens = group, whole.vocab_size, _tokens(whole, size)
        copies = max(size // whole.num_kv_heads, 1)  # ranks with the same head of keys and values
        kv = _share(whole.num_kv_heads, size)
        heads = kv * (whole.num_heads // whole.num_kv_heads) // copies
        inner = _share(whole.intermediate_size, size, UNIT)
        self.config = replace(whole, num_heads=heads, num_kv_heads=kv, intermediate_size=inner)
        d = whole.head_dim
        queries, keys = (rank * heads * d, heads * d), (rank // copies * kv * d, kv * d)
        mlp, tokens = (rank * inner, inner), (rank * self.num_tokens, self.num_tokens)
        # By module: the dimension that is divided, where the rank's part of it begins, and its size.
        self._parts = {"q_proj": (0, *queries), "k_proj": (0, *keys), "v_proj": (0, *keys)}
        self._parts |= {"gate_proj": (0, *mlp), "up_proj": (0, *mlp), "down_proj": (1, *mlp)}
        self._parts |= {"embed_tokens": (0, *tokens), "lm_head": (0, *tokens), "o_proj": (1, *queries)}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor of `ModelConfig.parameter_shapes`, with zeros where it reaches
        beyond the tensor."""
        dim, first, size = self._parts.get(name.split(".")[-2], (0, 0, len(tensor)))  # all of a norm
        if dim == tensor.dim():  # the bias of columns, which one rank adds
            return torch.zeros_like(tensor) if self.group.rank else tensor
        part = tensor.transpose(0, dim)[first : first + size]
        if missing := size - len(part):
            part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
        return part.transpose(0, dim)

    def joined(self, model: Model) -> Model:
        """Return the model of this rank's weights, connected with the others'."""
        first, group = self.group.rank * self.num_tokens, self.group
        for layer in model.layers:
            layer.o, layer.down = Summed(layer.o, group), Summed(layer.down, group)
        model.embedding = Embedding(model.embedding, group, first)  # type: ignore
        model.lm_head = Vocabulary(model.lm_head, group, self.vocab_size)
        model.num_devices = group.size
        return model


def check_split(whole: ModelConfig, size: int) -> None:
    """Raise ValueError unless every rank gets heads that others do not have, and tokens."""
    if (size - 1) * _tokens(whole, size) >= whole.vocab_size:
        raise ValueError(f"tensor_parallel_size={size} is too much for {whole.vocab_size} tokens; lower it.")
    fits = [n for n in range(1, whole.num_heads + 1) if _all_have_heads(whole, n)]
    if size not in fits:
        raise ValueError(
            f"tensor_parallel_size={size} cannot divide {whole.num_heads} attention heads with "
            f"{whole.num_kv_heads} of keys and values; use one of {', '.join(map(str, fits))}."
        )


def _all_have_heads(whole: ModelConfig, size: int) -> bool:
    """Return whether each of `size` ranks has query heads of its own."""
    if size <= whole.num_kv_heads:
        return (size - 1) * _share(whole.num_kv_heads, size) < whole.num_kv_heads
    return size % whole.num_kv_heads == 0 and whole.num_heads % size == 0


def _tokens(whole: ModelConfig, size: int) -> int:
    """Return how many rows of the vocabulary each of `size` ranks has."""
    return _share(whole.vocab_size, size, UNIT if UNIT * size**2 <= whole.vocab_size else 1)


def _share(count: int, size: int, unit: int = 1) -> int:
    """Return how many of `count` each of `size` ranks gets, rounded up to whole units."""
    return -(-count // (size * unit)) * unit
