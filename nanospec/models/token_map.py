"""Guess from a part of the vocabulary only (as in FR-Spec, Zhao et al., 2025).

The projection to the vocabulary is most of the work of a small model, and a few thousand tokens make up
nearly all of a text. `token_map` [Vd] lists the tokens that may be guessed; the target draws from all. A
draft model has it in `token_map.safetensors`, heads in their own file.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layer.linear import Linear, make_linear
from ..text import shown
from .decoder import Model
from .weights import open_safetensors

TOKEN_MAP = "token_map"
PIECE = 64  # columns of a packed lm_head that are read at once


def load_token_map(folder: Path, vocab_size: int) -> Tensor | None:
    """Return the tokens that the draft model in a folder guesses, [Vd] int64, or None for all."""
    file = folder / f"{TOKEN_MAP}.safetensors"
    if not file.is_file():
        return None
    with open_safetensors(file) as handle:
        if (names := list(handle.keys())) != [TOKEN_MAP]:
            raise ValueError(f"{file} must hold one tensor, {TOKEN_MAP!r}, not {shown(names)}.")
        return checked_token_map(handle.get_tensor(TOKEN_MAP), file, vocab_size)


def checked_token_map(ids: Tensor, file: Path, vocab_size: int) -> Tensor:
    """Return the token ids as int64. Raises ValueError if they are not ids of the model, or not distinct."""
    said, dtype = f"{TOKEN_MAP} in {file}", str(ids.dtype).removeprefix("torch.")
    if dtype not in ("int32", "int64") or ids.dim() != 1 or len(ids) == 0:
        raise ValueError(f"{said} must be a list of int32 or int64, not {dtype} {shown(list(ids.shape))}.")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{said} must hold different ids from 0 to {vocab_size - 1}; it fits another model.")
    return ids.long()


def lm_head_for(model: Model, token_map: Tensor | None) -> Linear:
    """Return the model's lm_head, or its rows of the tokens that are guessed."""
    return model.lm_head if token_map is None else make_linear(lm_head_rows(model, token_map))


def lm_head_rows(model: Model, tokens: Tensor) -> Tensor:
    """Return the rows of the target's lm_head for the tokens [n] int64, not packed: [n, H]. A packed lm_head
    cannot be read, but products with 0 and 1 are exact: the unit vectors give its columns."""
    if isinstance(model.embedding, Tensor) and model.config.tie_word_embeddings:
        return model.embedding[tokens]
    if model.lm_head.rows is not None:
        return model.lm_head.rows[tokens]
    units = torch.eye(model.config.hidden_size, dtype=model.dtype)
    return torch.cat([model.lm_head(piece)[:, tokens] for piece in units.split(PIECE)]).T.contiguous()


def over_vocabulary(logits: Tensor, vocab_size: int, token_map: Tensor | None) -> Tensor:
    """Return a drafter's logits [N, Vd] over the target's vocabulary, [N, vocab_size], with -inf for tokens
    that it never guesses."""
    if token_map is not None:
        everything = logits.new_full((len(logits), vocab_size), float("-inf"))
        return everything.index_copy_(1, token_map, logits)
    missing = vocab_size - logits.shape[1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, :vocab_size]
