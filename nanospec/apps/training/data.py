"""Training data: the target's hidden states at the positions of its texts, and the tokens that follow.

    train, held_out = split(rounds, cached_hidden(model, rounds, folder))

Hidden states are computed once and kept in a file per round of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from ...kernels.batch import Batch, Chunk
from ...kernels.table import Table
from ...models.decoder import Model
from ...models.kv_cache import kv_shape
from .corpus import Text
from .loop import TrainError, whole_file

HELD_OUT = 16  # of so many texts, one is kept for measuring
FORWARD_TOKENS = 2048  # per pass of the model over finished texts
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Span:
    """Rows of a text in `Data`: from `start` to `end`; from `answer` on the next token is the answer's."""

    start: int
    answer: int
    end: int
    text: Text


@dataclass
class Data:
    """Hidden states at R positions of texts, back to back, and what follows each position.

    Attributes:
        hidden: [R, H] on the CPU.
        tokens: [R] int64, the token at each position.
        left: [R] int64, how many positions of the same text follow.
        spans: where each text lies.
    """

    hidden: Tensor
    tokens: Tensor
    left: Tensor
    spans: list[Span]


def first_kept(text: Text) -> int:
    """The first position kept of a text: the one that the user's first token follows."""
    return max(text.user - 1, 0)


def by_length(texts: Sequence[Text], limit: int) -> list[list[int]]:
    """Numbers of texts of like length together, at most `limit` tokens with their padding (or one text)."""
    groups: list[list[int]] = [[]]
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i].ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(texts[i].ids) > limit:
            groups.append([])
        groups[-1].append(i)
    return groups


def forward(model: Model, sequences: Sequence[list[int]]) -> tuple[Tensor, ...]:
    """The model's hidden states of whole sequences, in one pass: [n, H] each, on the CPU."""
    lengths = [len(ids) for ids in sequences]
    table = Table.empty(len(sequences), max(lengths), BLOCK_SIZE, 0, model.device)
    num_blocks = table.block_table.numel()
    table.block_table.copy_(torch.arange(num_blocks).view_as(table.block_table))
    for row, ids in enumerate(sequences):
        table.tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    shape = kv_shape(model, num_blocks, BLOCK_SIZE)
    kv_cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
    batch = Batch.of_chunks(table, [Chunk(row, 0, n) for row, n in enumerate(lengths)])
    return model.forward(batch, kv_cache).cpu().split(lengths)


@torch.inference_mode()
def hidden_states(model: Model, texts: Sequence[Text], bar: Any = None) -> list[Tensor]:
    """The hidden states at the positions kept of each text, [n, H] each, on the CPU."""
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    for group in by_length(texts, FORWARD_TOKENS):
        for i, states in zip(group, forward(model, [texts[i].ids for i in group]), strict=True):
            found[i] = states[first_kept(texts[i]) :].clone()
            if bar is not None:
                bar.update(len(texts[i].ids))
    return found


def cached_hidden(model: Model, rounds: list[list[Text]], folder: Path) -> list[Tensor]:
    """The hidden states of each round of texts, [R, H]: read from `folder`, or computed and kept there."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    total = sum(len(text.ids) for texts in rounds for text in texts)
    with tqdm(total=total, unit="token", desc="hidden states", disable=None) as bar:
        for number, texts in enumerate(rounds):
            path = folder / f"hidden-{number:04}.safetensors"
            if path.is_file():
                part = _kept(path)
                bar.update(sum(len(text.ids) for text in texts))
            else:
                part = torch.cat(hidden_states(model, texts, bar))
                with whole_file(path) as temporary:
                    save_file({"hidden": part}, temporary)
            if len(part) != sum(len(text.ids) - first_kept(text) for text in texts):
                raise TrainError(f"{path} does not belong to the texts beside it; delete it.")
            parts.append(part)
    return parts


def _kept(path: Path) -> Tensor:
    try:
        return load_file(path)["hidden"]
    except (SafetensorError, KeyError) as error:
        raise TrainError(f"{path} is damaged; delete it, and it is computed again.") from error


def split(rounds: list[list[Text]], parts: list[Tensor]) -> tuple[Data, Data]:
    """The data to train on, and those held out: every `HELD_OUT`-th text."""
    pairs = [
        (text, states)
        for texts, part in zip(rounds, parts, strict=True)
        for text, states in zip(texts, part.split([len(text.ids) - first_kept(text) for text in texts]))
    ]
    return _data([pair for i, pair in enumerate(pairs) if i % HELD_OUT]), _data(pairs[::HELD_OUT])


def _data(pairs: list[tuple[Text, Tensor]]) -> Data:
    if not pairs:
        raise TrainError("there are too few texts to train on and to measure with; raise --tokens.")
    tokens, left, spans, row = [], [], [], 0
    for text, states in pairs:
        skipped = first_kept(text)
        spans.append(Span(row, row + max(text.answer - 1 - skipped, 0), row + len(states), text))
        tokens.append(torch.tensor(text.ids[skipped:]))
        left.append(torch.arange(len(states)).flip(0))
        row += len(states)
    return Data(torch.cat([states for _, states in pairs]), torch.cat(tokens), torch.cat(left), spans)
