"""Parallel heads (Medusa, Cai et al., 2024, arXiv 2401.10774): several next tokens from one hidden state.

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

`python weights/train_heads.py` trains such files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layer.linear import linear, pack
from .decoder import Model
from .token_map import TOKEN_MAP, checked_token_map, lm_head_rows
from .weights import STORED_DTYPES, listed, open_safetensors

FILES = ("medusa_lm_head.safetensors", "model.safetensors")
PREFIX = "medusa_head."


@dataclass(frozen=True)
class Block:
    """One residual block of every head, x + SiLU(W x + b), with possibly packed weights.

    Attributes:
        weights: a single [num_heads * H, H] where all heads read the same input, else [H, H] per head.
        biases: [num_heads * H], or [H] per head.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]


@dataclass(frozen=True)
class Heads:
    """Heads in place on the target's device; see the module docstring.

    Attributes:
        num_heads: how many tokens are guessed from one hidden state.
        blocks: the residual blocks, first to last.
        projections: [Vd, H], possibly packed: a single one that all heads share, or one per head.
        token_map: [Vd] int64, the token of each row of the projections; None if it is its index.
    """

    num_heads: int
    blocks: tuple[Block, ...]
    projections: tuple[Tensor, ...]
    token_map: Tensor | None

    @classmethod
    def load(cls, path: str | Path, model: Model) -> Heads:
        """The heads in a safetensors file, or in a folder with one of `FILES`, in the model's dtype.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is corrupt or does not fit the model.
        """
        file = _find(Path(path))
        with open_safetensors(file) as handle:
            names: list[str] = handle.keys()
            stored = {name.removeprefix(PREFIX): name for name in names}
            num_heads, num_layers = _count(file, stored)
            token_map = None
            if TOKEN_MAP in stored:
                ids = handle.get_tensor(stored[TOKEN_MAP])
                token_map = checked_token_map(ids, file, model.config.vocab_size).to(model.device)
            _check(file, handle, stored, num_heads, num_layers, token_map, model)

            def get(name: str) -> Tensor | None:
                if name not in stored:
                    return None
                tensor: Tensor = handle.get_tensor(stored[name])
                return tensor.to(device=model.device, dtype=model.dtype, copy=True)

            return _assemble(model, num_heads, num_layers, token_map, get)

    @classmethod
    def random(cls, model: Model, num_heads: int, vocab: int | None = None, seed: int = 0) -> Heads:
        """Heads of one block with random weights that share the target's lm_head, for tests.

        `vocab` restricts the guesses to that many random tokens.
        """
        generator = torch.Generator().manual_seed(seed)
        size, hidden = model.config.vocab_size, model.config.hidden_size
        token_map = None
        if vocab is not None:
            token_map = torch.randperm(size, generator=generator)[:vocab].sort().values.to(model.device)

        def get(name: str) -> Tensor | None:
            if name.endswith("linear.bias"):
                tensor = 0.1 * torch.randn(hidden, generator=generator)
            elif name.endswith("linear.weight"):
                tensor = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
            else:
                return None
            return tensor.to(model.device, model.dtype)

        return _assemble(model, num_heads, 1, token_map, get)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the guesses of each head: [N, H] -> [N, num_heads, Vd]."""
        first, *later = self.blocks
        update = linear(hidden, first.weights[0], first.biases[0])  # [N, num_heads * H]
        x = hidden[:, None] + F.silu(update).unflatten(1, (self.num_heads, -1))  # [N, num_heads, H]
        for block in later:
            x = x + F.silu(_each(x, block.weights, block.biases))
        if len(self.projections) == 1:
            logits = linear(x.flatten(0, 1), self.projections[0])  # one product for all heads
            return logits.unflatten(0, (len(hidden), self.num_heads))
        return _each(x, self.projections, (None,) * self.num_heads)

    def top(self, hidden: Tensor, count: int) -> Tensor:
        """The `count` likeliest tokens of each head, the likeliest first: [N, num_heads, count] int32."""
        logits = self.logits(hidden)
        if count > logits.shape[-1]:
            raise ValueError(
                f"count={count} tokens per head are more than the {logits.shape[-1]} that the heads can "
                "guess; ask for fewer."
            )
        index = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count).indices
        return (index if self.token_map is None else self.token_map[index]).int()


def _each(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Tensor:
    """A matrix of its own for each head: [N, num_heads, K] -> [N, num_heads, M]."""
    columns = x.transpose(0, 1).contiguous()  # [num_heads, N, K]
    return torch.stack([linear(*parts) for parts in zip(columns, weights, biases, strict=True)], 1)


def _assemble(
    model: Model,
    num_heads: int,
    num_layers: int,
    token_map: Tensor | None,
    get: Callable[[str], Tensor | None],
) -> Heads:
    """Heads of the tensors that `get` gives by name, None for a projection that is the target's own."""
    blocks = []
    for layer in range(num_layers):
        weights, biases = (
            tuple(_there(get(f"{head}.{layer}.linear.{part}")) for head in range(num_heads))
            for part in ("weight", "bias")
        )
        if layer == 0:
            weights, biases = (torch.cat(weights),), (torch.cat(biases),)
        blocks.append(Block(tuple(pack(weight) for weight in weights), biases))
    own = [get(f"{head}.{num_layers}.weight") for head in range(num_heads)]
    if all(weight is None for weight in own):
        own = own[:1]  # one projection for all
    shared = None
    if any(weight is None for weight in own):
        shared = model.lm_head if token_map is None else pack(lm_head_rows(model, token_map))
    projections = tuple(_there(shared) if weight is None else pack(weight) for weight in own)
    return Heads(num_heads, tuple(blocks), projections, token_map)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    if not path.is_dir():
        raise FileNotFoundError(f"there are no heads at {path}; give a .safetensors file or its folder.")
    other = ", ".join(sorted(f.name for f in path.iterdir() if f.suffix in (".pt", ".bin", ".pth")))
    hint = f" (found {other}; convert to safetensors first)" if other else ""
    raise FileNotFoundError(f"{path} holds neither {' nor '.join(FILES)}{hint}.")


def _count(file: Path, stored: dict[str, str]) -> tuple[int, int]:
    """(num_heads, num_layers) as the names of the tensors have it."""
    found = [re.fullmatch(r"((\d+)\.(\d+))\.linear\.(?:weight|bias)", name) for name in stored]
    blocks = {match[1]: (int(match[2]), int(match[3])) for match in found if match}
    if not blocks:
        raise ValueError(
            f"{file} holds no heads: no tensor has a name such as '0.0.linear.weight' (it has "
            f"{listed(stored) or 'no tensors'}); give a file of Medusa heads."
        )
    num_heads, num_layers = (max(column) + 1 for column in zip(*blocks.values(), strict=True))
    names = (f"{head}.{layer}" for head in range(num_heads) for layer in range(num_layers))
    gap = next((name for name in names if name not in blocks), None)
    if gap is not None:
        raise ValueError(
            f"{file} lacks {gap}.linear.weight, although it has heads up to {num_heads - 1} and blocks up to "
            f"{num_layers - 1}; download it again."
        )
    return num_heads, num_layers


def _check(
    file: Path,
    handle: Any,
    stored: dict[str, str],
    num_heads: int,
    num_layers: int,
    token_map: Tensor | None,
    model: Model,
) -> None:
    """Raise one ValueError that names every tensor that is missing, extra or unfit."""
    hidden = model.config.hidden_size
    rows = model.config.vocab_size if token_map is None else len(token_map)
    needed: dict[str, tuple[int, ...]] = {}
    for block in (f"{head}.{layer}" for head in range(num_heads) for layer in range(num_layers)):
        needed[f"{block}.linear.weight"] = (hidden, hidden)
        needed[f"{block}.linear.bias"] = (hidden,)
    optional = {f"{head}.{num_layers}.weight": (rows, hidden) for head in range(num_heads)}
    expected = {**needed, **optional}
    misshapen, foreign = [], []
    for name in expected.keys() & stored.keys():
        tensor = handle.get_slice(stored[name])
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape != expected[name]:
            misshapen.append(f"{name} {list(shape)} instead of {list(expected[name])}")
        if dtype not in STORED_DTYPES:
            foreign.append(f"{name} {dtype}")
    problems = {
        "missing": needed.keys() - stored.keys(),
        "not expected": stored.keys() - expected.keys() - {TOKEN_MAP},
        "of the wrong shape": misshapen,
        f"stored as something else than {', '.join(STORED_DTYPES)}": foreign,
    }
    found = [f"{len(n)} tensor(s) {what}: {listed(n)}" for what, n in problems.items() if n]
    if found:
        raise ValueError(
            f"The {num_heads} heads of {num_layers} block(s) in {file} do not fit the model (hidden size "
            f"{hidden}, {rows} tokens to guess): {'; '.join(found)}."
        )


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # `_check` has seen to it
    return tensor
