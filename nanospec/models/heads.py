"""Medusa heads (Cai et al., 2024, arXiv 2401.10774): several next tokens from one hidden state.

    heads = Heads.load(path, model)
    drafts = heads.top(hidden, 1)                              [N, H] -> [N, num_heads, 1] int32

`hidden` is what `Model.forward` returned at a position t, from which the target itself draws token t+1.
Head i guesses token t+2+i from it: residual blocks x + SiLU(W x + b), then a projection to the vocabulary.

Files have the layout that FasterDecoding/Medusa publishes, with H the target's hidden size, V its
vocabulary, L blocks per head; each name may begin with `medusa_head.`:

    {head}.{0 .. L-1}.linear.weight  [H, H]
    {head}.{0 .. L-1}.linear.bias    [H]
    {head}.{L}.weight                [V, H]       may be missing: the head then shares the target's lm_head
    token_map                        [Vd] ints    optional: the only tokens that are guessed, so that
                                                  projections have Vd rows (as in vLLM)

`nanospec train` writes such files.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layer.linear import Linear, make_linear
from .decoder import GetWeight, Model
from .token_map import TOKEN_MAP, checked_token_map, lm_head_rows
from .weights import check_fit, listed, open_safetensors

PREFIX = "medusa_head."


class Layout(NamedTuple):
    """The number of heads of a file, and of residual blocks in each head."""

    num_heads: int
    num_layers: int

    def projections(self) -> list[str]:
        """Return the names of the projections to the vocabulary."""
        return [f"{head}.{self.num_layers}.weight" for head in range(self.num_heads)]

    def shapes(self, hidden: int, rows: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, for hidden states of that size and `rows` tokens to guess."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.projections(), (rows, hidden))
        for head, layer in product(range(self.num_heads), range(self.num_layers)):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        return shapes


@dataclass(frozen=True)
class Heads:
    """Heads on the target's device.

    Attributes:
        num_heads: number of tokens guessed from one hidden state.
        blocks: of each head, x + SiLU(W x + b), first to last: a single [num_heads * H, H] in the first one,
            whose input all heads share, else [H, H] per head.
        projections: [Vd, H]: a single one that all heads share, or one per head.
        token_map: [Vd] int64, the token of each row of the projections; None if it is its index.
    """

    num_heads: int
    blocks: tuple[tuple[Linear, ...], ...]
    projections: tuple[Linear, ...]
    token_map: Tensor | None

    @classmethod
    def load(cls, path: str | Path, model: Model) -> Heads:
        """Load the heads of a safetensors file in the model's dtype. Raises FileNotFoundError, or ValueError
        for a file that is corrupt or does not fit the model."""
        file, hidden, rows = Path(path), model.config.hidden_size, model.config.vocab_size
        if not file.is_file():
            raise FileNotFoundError(f"there are no heads at {file}; give a .safetensors file of heads.")
        with open_safetensors(file) as handle:
            stored = {name.removeprefix(PREFIX): name for name in handle.keys()}  # noqa: SIM118
            layout = _layout(file, stored)
            token_map = None
            if TOKEN_MAP in stored:
                ids = handle.get_tensor(stored.pop(TOKEN_MAP))
                token_map = checked_token_map(ids, file, rows).to(model.device)
                rows = len(token_map)
            slices = {name: handle.get_slice(full_name) for name, full_name in stored.items()}
            what = f"The {layout.num_heads} heads of {layout.num_layers} block(s) in {file} do not fit the "
            what += f"model (hidden size {hidden}, {rows} tokens to guess)"
            check_fit(slices, layout.shapes(hidden, rows), what, optional=layout.projections())

            def get(name: str) -> Tensor:
                tensor: Tensor = handle.get_tensor(stored[name])
                return tensor.to(model.device, model.dtype, copy=True)

            return assemble(model, layout, token_map, get, own=stored)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the blocks and projections, of which one may be the target's lm_head."""
        return sum(linear.num_bytes for linears in (*self.blocks, self.projections) for linear in linears)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the guesses of each head: [N, H] -> [N, num_heads, Vd]."""
        (first,), *later = self.blocks
        update = first(hidden)  # [N, num_heads * H]
        x = hidden[:, None] + F.silu(update).unflatten(1, (self.num_heads, -1))  # [N, num_heads, H]
        for block in later:
            x = x + F.silu(_each(x, block))
        if len(self.projections) == 1:
            logits = self.projections[0](x.flatten(0, 1))  # one product for all heads
            return logits.unflatten(0, (len(hidden), self.num_heads))
        return _each(x, self.projections)

    def top(self, hidden: Tensor, count: int) -> Tensor:
        """Return the `count` likeliest tokens of each head, best first: [N, num_heads, count] int32."""
        logits = self.logits(hidden)
        index = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count).indices
        return (index if self.token_map is None else self.token_map[index]).int()


def _each(x: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """Multiply by one matrix per head: [N, num_heads, K] -> [N, num_heads, M]."""
    columns = x.transpose(0, 1).contiguous()  # [num_heads, N, K]
    return torch.stack([linear(part) for linear, part in zip(linears, columns, strict=True)], 1)


def assemble(
    model: Model, layout: Layout, token_map: Tensor | None, get: GetWeight, own: Collection[str] = ()
) -> Heads:
    """Make heads of the tensors that `get` returns; projections that are not in `own` are the target's."""
    blocks = []
    for layer in range(layout.num_layers):
        names = [f"{head}.{layer}.linear" for head in range(layout.num_heads)]
        weights, biases = ([get(f"{name}.{part}") for name in names] for part in ("weight", "bias"))
        if layer == 0:
            weights, biases = [torch.cat(weights)], [torch.cat(biases)]
        blocks.append(tuple(map(make_linear, weights, biases)))
    names = layout.projections()
    found = {name: make_linear(get(name)) for name in names if name in own}
    projections = tuple(found.values())
    if len(found) < len(names):
        shared = model.lm_head if token_map is None else make_linear(lm_head_rows(model, token_map))
        projections = tuple(found.get(name, shared) for name in names) if found else (shared,)
    return Heads(layout.num_heads, tuple(blocks), projections, token_map)


def _layout(file: Path, names: Collection[str]) -> Layout:
    """Return the layout that the names of the tensors show. Raises ValueError if there is none."""
    found = [re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,2})\.linear\.(?:weight|bias)", name) for name in names]
    blocks = [(int(match[1]), int(match[2])) for match in found if match]
    if not blocks:
        raise ValueError(
            f"{file} holds no heads: no tensor has a name such as '0.0.linear.weight' (it has "
            f"{listed(names) or 'no tensors'}); give a file of Medusa heads."
        )
    return Layout(*(max(column) + 1 for column in zip(*blocks, strict=True)))
