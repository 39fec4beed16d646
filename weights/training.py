"""What training on a model's own text takes, whatever is trained: `train_heads.py`, `train_draft.py`.

Texts (`corpus.py`) become `Data`: the model's hidden states at every position, computed once and kept in a
file per round of texts, and the tokens that follow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import Text
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from nanospec.kernels.batch import Batch
from nanospec.models.decoder import Model

HELD_OUT = 16  # of so many texts, one is kept for measuring
WINDOW = 1024  # tokens of a conversation
FORWARD_TOKENS = 2048  # per pass of the model over finished texts
WARMUP = 0.05  # of all steps


class TrainError(ValueError):
    """The training cannot run; the message says why."""


def claim(work: Path, model: Path, prompts: Path | None, seed: int) -> None:
    """Note in the work folder whose it is; TrainError if it belongs to another model, prompts or seed."""
    mine = {"model": str(model.resolve()), "prompts": prompts and str(prompts.resolve()), "seed": seed}
    note = work / "work.json"
    if note.is_file():
        theirs = json.loads(note.read_text(encoding="utf-8"))
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise TrainError(
                    f"--work {work} was begun with {name}={theirs.get(name)!r}, not {value!r}; name another "
                    "folder or delete it."
                )
    work.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(mine), encoding="utf-8")


@dataclass
class Data:
    """Hidden states of R positions of texts, back to back, and what follows each position.

    Attributes:
        hidden: [R, H] on the CPU.
        tokens: [R] int64, the token at each position.
        left: [R] int64, how many positions of the same text follow.
        texts: (first row, first row whose next token is the answer's, end row, text), one per text.
    """

    hidden: Tensor
    tokens: Tensor
    left: Tensor
    texts: list[tuple[int, int, int, Text]]


def first_row(text: Text) -> int:
    """The first position kept of a text: from it the first token of the user's message is foreseen."""
    return max(text.user - 1, 0)


@torch.inference_mode()
def hidden_states(model: Model, texts: Sequence[Text], bar: Any) -> Tensor:
    """What `Model.forward` gives at positions `first_row(text)` and after of all texts: [R, H] on the CPU."""
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    block = 16
    batches: list[list[int]] = [[]]
    for i in by_length:
        if batches[-1] and (len(batches[-1]) + 1) * len(texts[i].ids) > FORWARD_TOKENS:
            batches.append([])
        batches[-1].append(i)
    for batch in batches:
        lengths = [len(texts[i].ids) for i in batch]
        pages = -(-max(lengths) // block)
        config = model.config
        shape = (config.num_layers, 2, config.num_kv_heads, len(batch) * pages, block, config.head_dim)
        cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        table = torch.arange(len(batch) * pages, dtype=torch.int32).view(len(batch), pages)
        count = torch.tensor(lengths)
        row = torch.repeat_interleave(torch.arange(len(batch)), count)
        q_start = count.cumsum(0) - count
        position = torch.arange(int(count.sum())) - q_start[row]
        rows = Batch(
            positions=position.int().to(model.device),
            slots=(row * pages * block + position).int().to(model.device),
            block_table=table.to(model.device),
            q_start=q_start.int().to(model.device),
            q_len=count.int().to(model.device),
            base_len=torch.zeros_like(count).int().to(model.device),
            max_q_len=max(lengths),
            max_kv_len=max(lengths),
            prefill=True,
        )
        ids = torch.tensor([token for i in batch for token in texts[i].ids], dtype=torch.int32)
        hidden = model.forward(ids.to(model.device), cache, rows).cpu()
        for i, part in zip(batch, hidden.split(lengths), strict=True):
            found[i] = part[first_row(texts[i]) :].clone()
        bar.update(len(ids))
    return torch.cat(found)


def cached_hidden(model: Model, rounds: list[list[Text]], folder: Path) -> list[Tensor]:
    """The hidden states of each round of texts, from the files in `folder` as far as they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    total = sum(len(text.ids) for texts in rounds for text in texts)
    with tqdm(total=total, unit="token", desc="hidden states", disable=None) as bar:
        for number, texts in enumerate(rounds):
            path = folder / f"hidden-{number:04}.safetensors"
            if path.is_file():
                part = load_file(path)["hidden"]
                bar.update(sum(len(text.ids) for text in texts))
            else:
                part = hidden_states(model, texts, bar)
                with whole_file(path) as temporary:
                    save_file({"hidden": part}, temporary)
            if len(part) != sum(len(text.ids) - first_row(text) for text in texts):
                raise TrainError(f"{path} does not belong to the texts beside it; delete it.")
            parts.append(part)
    return parts


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, which gets its name when it is complete."""
    temporary = path.with_name(f".{path.name}.part")
    yield temporary
    temporary.chmod(0o644)  # safetensors writes files that others may not read
    os.replace(temporary, path)


def split(rounds: list[list[Text]], parts: list[Tensor]) -> tuple[Data, Data]:
    """The data to train on, and those held out: every `HELD_OUT`-th text."""
    chosen: tuple[list[tuple[Text, Tensor]], ...] = ([], [])
    number = 0
    for texts, part in zip(rounds, parts, strict=True):
        lengths = [len(text.ids) - first_row(text) for text in texts]
        for text, hidden in zip(texts, part.split(lengths), strict=True):
            chosen[number % HELD_OUT == 0].append((text, hidden))
            number += 1
    train, held_out = (_data(pairs) for pairs in chosen)
    return train, held_out


def _data(pairs: list[tuple[Text, Tensor]]) -> Data:
    if not pairs:
        raise TrainError("there are too few texts to train on and to measure with; raise --tokens.")
    tokens, left, texts, row = [], [], [], 0
    for text, hidden in pairs:
        skipped = first_row(text)
        texts.append((row, row + max(text.answer - 1 - skipped, 0), row + len(hidden), text))
        tokens.append(torch.tensor(text.ids[skipped:]))
        left.append(torch.arange(len(hidden)).flip(0))
        row += len(hidden)
    return Data(torch.cat([hidden for _, hidden in pairs]), torch.cat(tokens), torch.cat(left), texts)


def choose_vocab(data: Data, size: int, vocab_size: int) -> Tensor:
    """The `size` (0: all) most frequent tokens of the text, ascending; [Vd] int64.

    When the text has fewer, the lowest ids follow: most tokenizers number tokens by frequency.
    """
    if size == 0 or size >= vocab_size:
        return torch.arange(vocab_size)
    counts = torch.bincount(data.tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class FrozenCrossEntropy(torch.autograd.Function):
    """Weighted cross entropy of softmax(x @ projection.T), where the projection is not trained.

    x [N, H], projection [Vd, H], target [N, Vd] probabilities or [N] indices, weight [N] -> a scalar.
    The gradient is computed at once, as in Liger-Kernel, with everything as wide as the vocabulary in the
    dtype of the projection.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        logits = x.to(projection.dtype) @ projection.T  # [N, Vd]
        difference = logits.softmax(-1)
        if target.dim() == 2:
            loss = logits.logsumexp(-1).float() - (target * logits).sum(-1, dtype=torch.float32)
            difference -= target
        else:
            rows = torch.arange(len(x), device=x.device)
            loss = -difference[rows, target].float().clamp(min=1e-12).log()
            difference[rows, target] -= 1
        gradient = difference @ projection
        ctx.save_for_backward(gradient.to(x.dtype) * weight[:, None])
        return (loss * weight).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None, None
