"""Split a model among ranks.

    q, k, v, the KV cache   by KV head, with the query heads that read it
    gate, up                by row
    o, down                 by column: each rank computes a partial sum, which `RowParallelLinear` reduces
    embedding, lm_head      by row (vocabulary parallel)
    biases of o and down    on rank 0; zeros on the others
    norms                   replicated

Partial sums are gathered and added in rank order, so all ranks compute bitwise identical results. (The order
of a library's all-reduce depends on the message size, so results would depend on the batch.) All ranks have
the same shapes, and therefore the same memory and work: KV heads that do not divide evenly are padded with
zeros. If there are fewer KV heads than ranks, several ranks replicate one and split its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.layer.linear import Linear
from ...kernels.layer.residual import Norm, Residual, look_up, residual_add
from ...models.config import ModelConfig
from ...models.decoder import Model
from .process_group import ProcessGroup

UNIT = 32  # alignment of a shard's intermediate size and vocabulary, for full vectors and quantized groups


class RowParallelLinear(Linear):
    """A row-parallel linear layer (by rows of weight.T): each rank multiplies by its `part` [N, K / ranks] of
    the weight, and the partial products are added. The bias is on one rank; the others have zeros."""

    def __init__(self, part: Linear, group: ProcessGroup) -> None:
        super().__init__(part.weight, part.bias)
        self.part, self.group = part, group

    def add_to(self, residual: Residual, x: Tensor, norm: Norm, out_norm: Norm | None = None) -> Residual:
        """Add all ranks' partial products [T, H] in rank order in float32, and round."""
        parts, used = self.group.all_gather(self.part(x, num_used=residual.num_used)), residual.num_used
        return residual_add(parts, residual.x, norm, out_norm, num_used=used)


class ParallelLMHead(Linear):
    """The vocabulary-parallel lm_head [V, H], V = `size`. Each rank's `part` has at least V / ranks rows."""

    def __init__(self, part: Linear, group: ProcessGroup, size: int) -> None:
        super().__init__(part.weight)
        self.part, self.group, self.size = part, group, size

    def __call__(self, x: Tensor, out: Tensor | None = None, num_used: Tensor | None = None) -> Tensor:
        """Return the logits [T, V] of the whole vocabulary."""
        columns = self.group.all_gather(self.part(x, num_used=num_used))  # [ranks, T, len(part)]
        logits = columns.transpose(0, 1).flatten(1)[:, : self.size]
        return logits.contiguous() if out is None else out.copy_(logits)


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """The vocabulary-parallel embedding [V, H]. Each rank has a `part`: `size` rows from `first` on."""

    part: Any
    group: ProcessGroup
    first: int
    size: int

    def rows(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, H] of ids [T]. Ranks that do not have a row contribute zeros."""
        mine = (ids >= self.first) & (ids < self.first + self.size)
        rows = look_up(torch.where(mine, ids - self.first, 0), self.part)
        return self.group.all_gather(rows.masked_fill(~mine[:, None], 0)).sum(0)


class Shard:
    """The shard of one rank. Implements `models.weights.Split`.

    Attributes:
        config: the model config with this rank's head counts and intermediate size.
        num_tokens: the number of vocabulary rows per rank.
    """

    def __init__(self, whole: ModelConfig, group: ProcessGroup) -> None:
        """Compute the shard. Raises ValueError if the model cannot be split among the ranks."""
        size, rank = group.size, group.rank
        check_split(whole, size)
        self.group, self.vocab_size = group, whole.vocab_size
        self.num_tokens = _share(whole.vocab_size, size, UNIT)
        copies = max(size // whole.num_kv_heads, 1)  # the number of ranks that share a KV head
        kv = _share(whole.num_kv_heads, size)
        heads = kv * (whole.num_heads // whole.num_kv_heads) // copies
        inner = _share(whole.intermediate_size, size, UNIT)
        self.config = replace(whole, num_heads=heads, num_kv_heads=kv, intermediate_size=inner)
        d = whole.head_dim
        queries, keys = (rank * heads * d, heads * d), (rank // copies * kv * d, kv * d)
        mlp, tokens = (rank * inner, inner), (rank * self.num_tokens, self.num_tokens)
        # By module: the dimension to split, and the start and size of the rank's part.
        self._parts = {"q_proj": (0, *queries), "k_proj": (0, *keys), "v_proj": (0, *keys)}
        self._parts |= {"gate_proj": (0, *mlp), "up_proj": (0, *mlp), "down_proj": (1, *mlp)}
        self._parts |= {"embed_tokens": (0, *tokens), "lm_head": (0, *tokens), "o_proj": (1, *queries)}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor of `ModelConfig.parameter_shapes`, padded with zeros."""
        dim, first, size = self._parts.get(name.split(".")[-2], (0, 0, len(tensor)))  # norms are replicated
        if dim == tensor.dim():  # the bias of a row-parallel layer, which only rank 0 adds
            return torch.zeros_like(tensor) if self.group.rank else tensor
        part = tensor.transpose(0, dim)[first : first + size]
        if missing := size - len(part):
            part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
        return part.transpose(0, dim)

    def joined(self, model: Model) -> Model:
        """Return the model of this rank's weights with layers that communicate with the other ranks."""
        first, group = self.group.rank * self.num_tokens, self.group
        for layer in model.layers:
            layer.o, layer.down = RowParallelLinear(layer.o, group), RowParallelLinear(layer.down, group)
        model.embedding = VocabParallelEmbedding(model.embedding, group, first, self.num_tokens)
        model.lm_head = ParallelLMHead(model.lm_head, group, self.vocab_size)
        model.num_devices = group.size
        return model


def check_split(whole: ModelConfig, size: int) -> None:
    """Raise ValueError unless every rank gets query heads."""
    fits = [n for n in range(1, whole.num_heads + 1) if _all_have_heads(whole, n)]
    if size not in fits:
        raise ValueError(
            f"tensor_parallel_size={size} cannot split {whole.num_heads} attention heads and "
            f"{whole.num_kv_heads} KV heads; use one of {', '.join(map(str, fits))}."
        )


def _all_have_heads(whole: ModelConfig, size: int) -> bool:
    """Return whether each of `size` ranks gets query heads."""
    if size <= whole.num_kv_heads:
        return (size - 1) * _share(whole.num_kv_heads, size) < whole.num_kv_heads
    return size % whole.num_kv_heads == 0 and whole.num_heads % size == 0


def _share(count: int, size: int, unit: int = 1) -> int:
    """Return `count` divided by `size`, rounded up to a multiple of `unit`."""
    return -(-count // (size * unit)) * unit
