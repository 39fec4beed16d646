"""Train Medusa heads (Cai et al., 2024, arXiv 2401.10774) for a model, which stays as it is.

    nanospec train heads --model NAME [--out FILE] [--tokens N] [--prompts FILE.jsonl] ...

Three stages, each resumable: whatever the work folder holds is not done again.

1. text      the model writes it itself (`corpus.py`)
2. hidden    one pass of the model over each text (`data.py`)
3. training  head i is to foresee, from the hidden state at position t, the token at t + 2 + i

A head begins as the model's own (W = 0) and keeps its lm_head, restricted to the tokens that the text has
most often, so that the result is small: `models/heads.py` says what is in the file. Its metadata hold the
settings and what was measured on texts left out of training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ...models.decoder import Model
from ...models.heads import Heads
from ...models.hub import resolve_model, weights_folders
from ...models.token_map import TOKEN_MAP, lm_head_rows
from ...text.checks import shown
from . import loop
from .command import new_parser, prepare, run_command, settings_of, timed
from .data import Data, Span
from .loop import TrainError, option, whole_file
from .loss import FrozenCrossEntropy, most_frequent

RUN = 32  # consecutive positions that a batch takes together: they share the model's distributions
PIECE = {"cpu": 256, "cuda": 4096}  # positions of a batch whose logits exist at once
DECAY = 0.8  # weight of head i in the loss: DECAY ** i, as in the paper
RANKS = 10  # guesses per head whose accuracy is measured
EVAL_ROWS = 512  # at once


@dataclass(frozen=True)
class Settings(loop.Settings):
    """As `loop.Settings`.

    Attributes:
        labels: "soft" is the model's own distribution at the position that a head foresees (Hinton et al.,
            2015), "hard" the token that stands there.
    """

    num_heads: int = option(4, "tokens foreseen", 1, 16)
    num_layers: int = option(2, "blocks per head", 1, 8)
    vocab: int = option(8192, "tokens that are guessed; 0: all", 0)
    epochs: int = option(4, "passes over the text", 1)
    batch: int = option(1024, "positions per step", RUN)
    lr: float = option(3e-3, "highest learning rate", 0, 1)
    weight_decay: float = option(0.0, "of AdamW", 0, 10)
    labels: str = option("soft", "soft: the model's distribution; hard: text")
    seed: int = option(0, "of the text and of the order of batches", 0, 2**31 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in ("soft", "hard"):
            raise ValueError(f"labels={shown(self.labels)} must be 'soft' or 'hard'.")


class HeadsTrainer(loop.Trainer):
    """Heads in training: weight [num_heads, num_layers, H, H], bias [num_heads, num_layers, H].

    The items of an epoch are runs of `RUN` positions.
    """

    def __init__(self, model: Model, settings: Settings, train: Data, held_out: Data) -> None:
        self.settings, self.data, self.held_out = settings, train, held_out
        self.device, self.dtype = model.device, model.dtype  # of the products; sums are float32
        self.vocab_size, hidden = model.config.vocab_size, model.config.hidden_size
        shape = (settings.num_heads, settings.num_layers, hidden)
        self.weight = torch.zeros(*shape, hidden, device=self.device, requires_grad=True)
        self.bias = torch.zeros(shape, device=self.device, requires_grad=True)
        super().__init__(settings, {"weight": self.weight, "bias": self.bias}, settings.weight_decay)
        self.token_map = most_frequent(train.tokens, settings.vocab, self.vocab_size)
        self.projection = lm_head_rows(model, self.token_map.to(self.device)).contiguous()  # [Vd, H]
        index = torch.full((self.vocab_size,), -1)
        index[self.token_map] = torch.arange(len(self.token_map))
        self.labels = index[train.tokens]  # [R], -1 outside the map
        self.num_items = max(len(train.tokens) // RUN, 1)
        self.items_per_step = max(settings.batch // RUN, 1)
        self.steps_per_epoch = max(self.num_items * RUN // settings.batch, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """The heads' states before the projection: [N, H] -> [num_heads, N, H] float32."""
        x = hidden.float().expand(self.settings.num_heads, -1, -1)
        weight = self.weight.to(self.dtype)
        for layer in range(self.settings.num_layers):
            update = x.to(self.dtype) @ weight[:, layer].mT
            x = x + F.silu(update.float() + self.bias[:, layer, None])
        return x

    def backward(self, items: Tensor, generator: torch.Generator) -> float:
        n = self.settings.num_heads
        shift = int(torch.randint(RUN, (1,), generator=generator))
        rows = (items * RUN + shift)[:, None] + torch.arange(RUN + n + 1)  # [C, RUN + n + 1]
        rows = rows.clamp(max=len(self.data.tokens) - 1)
        labels = self.labels[torch.stack([rows[:, 2 + i : 2 + i + RUN] for i in range(n)])]  # [n, C, RUN]
        ahead = 2 + torch.arange(n)[:, None, None]
        valid = (labels >= 0) & (self.data.left[rows[:, :RUN]] >= ahead)
        decay = DECAY ** torch.arange(n)
        weights = valid * (decay / valid.sum((1, 2)).clamp(min=1))[:, None, None]
        loss, piece = 0.0, PIECE[self.device.type] // RUN
        for part in (slice(start, start + piece) for start in range(0, len(rows), piece)):
            hidden = self.data.hidden[rows[part, : RUN + n]].to(self.device)  # [c, RUN + n, H]
            loss += self._backward(hidden, labels[:, part].to(self.device), weights[:, part].to(self.device))
        return loss / float(decay.sum())

    def _backward(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> float:
        """Add the gradient of c runs: hidden [c, RUN + n, H], labels and weights [n, c, RUN] -> the loss."""
        states = self.forward(hidden[:, :RUN].flatten(0, 1))  # [n, c * RUN, H]
        if self.settings.labels == "soft":
            own = (hidden[:, 1:].to(self.dtype) @ self.projection.T).softmax(-1)
            targets = [own[:, head : head + RUN].flatten(0, 1) for head in range(len(states))]
        else:
            targets = list(labels.clamp(min=0).flatten(1))
        losses = [
            FrozenCrossEntropy.apply(x, self.projection, target, weight)
            for x, target, weight in zip(states, targets, weights.flatten(1), strict=True)
        ]
        loss = torch.stack(losses).sum()
        loss.backward()
        return float(loss.detach())

    def evaluate(self, training_loss: float) -> dict[str, Any]:
        figures = measure(self.guess, self.held_out)["all"]
        return {"loss": training_loss, **{name: figures[name] for name in ("tokens_per_step", "accuracy")}}

    @torch.no_grad()
    def guess(self, hidden: Tensor) -> Tensor:
        """The RANKS likeliest tokens of each head, likeliest first: [N, H] -> [N, num_heads, RANKS]."""
        states = self.forward(hidden.to(self.device)).to(self.dtype)
        logits = (states @ self.projection.T).transpose(0, 1)
        return self.token_map[logits.topk(min(RANKS, logits.shape[-1])).indices.cpu()]


def measure(guess: Callable[[Tensor], Tensor], data: Data) -> dict[str, Any]:
    """How often guesses are right on the answers in `data`.

    `guess` is as `HeadsTrainer.guess`. Gives, for all answers and for the greedy and the sampled ones:
        accuracy: of each head's first guess. A token outside the vocabulary of the guesses is a miss.
        accuracy_by_rank: of each head's first, second, ... guess.
        tokens_per_step: of a chain of the first guesses, the target's own token included, when each step
            begins where the last one ended.
        positions: how many were measured for the first head.
    """
    guesses = torch.cat([guess(part) for part in data.hidden.split(EVAL_ROWS)])  # [R, n, RANKS]
    ahead = 2 + torch.arange(guesses.shape[1])
    label = data.tokens[(torch.arange(len(data.tokens))[:, None] + ahead).clamp(max=len(data.tokens) - 1)]
    exists = data.left[:, None] >= ahead  # [R, n]
    right = (guesses == label[..., None]) & exists[..., None]  # [R, n, RANKS]
    chosen = {
        "all": data.spans,
        "greedy": [span for span in data.spans if span.text.temperature == 0],
        "sampled": [span for span in data.spans if span.text.temperature != 0],
    }
    return {name: _figures(right, exists, spans) for name, spans in chosen.items()}


def _figures(right: Tensor, exists: Tensor, spans: list[Span]) -> dict[str, Any]:
    """`measure` for some texts; right [R, n, RANKS] and exists [R, n] bool."""
    answer = torch.zeros(len(right), dtype=torch.bool)
    chain = right[..., 0].long().cumprod(1).sum(1).tolist()
    steps = tokens = 0
    for span in spans:
        answer[span.answer : span.end] = True
        row = span.answer
        while row < span.end - 1:  # the target's own token is drawn from this row
            steps += 1
            row += 1 + chain[row]
        tokens += row - span.answer
    counted = (exists & answer[:, None]).sum(0).clamp(min=1)
    by_rank = (right & answer[:, None, None]).sum(0) / counted[:, None]  # [n, RANKS]
    return {
        "accuracy": [round(float(value), 4) for value in by_rank[:, 0]],
        "accuracy_by_rank": [[round(float(v), 4) for v in row] for row in by_rank],
        "tokens_per_step": round(tokens / max(steps, 1), 3),
        "positions": int(counted[0]),
    }


def save_heads(path: Path, trainer: HeadsTrainer, metadata: dict[str, Any]) -> None:
    """Write the heads in bf16, without projections: they are the target's."""
    tensors = {}
    if len(trainer.token_map) < trainer.vocab_size:
        tensors[TOKEN_MAP] = trainer.token_map.int()
    for name, values in trainer.weights.items():
        for head, layers in enumerate(values.detach().to("cpu", torch.bfloat16)):
            for layer, part in enumerate(layers):
                tensors[f"{head}.{layer}.linear.{name}"] = part.clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        save_file(tensors, temporary, {"nanospec": json.dumps(metadata)})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All stages; returns the figures."""
    settings, folder = settings_of(args, Settings), resolve_model(args.model)
    out = args.out or default_out(folder.name)
    if out.suffix != ".safetensors":
        raise TrainError(f"--out {out} must end in .safetensors.")
    work = args.work or out.parent / f".{out.stem}-work"
    got = prepare(args, folder, work)
    trainer = HeadsTrainer(got.model, settings, got.train, got.held_out)
    positions = len(got.train.tokens)
    with timed(got.seconds, "training"):
        untrained = measure(trainer.guess, got.held_out)["all"]
        history = trainer.train(work / f"training-{settings.key(positions)}.pt")
    figures = {
        "model": folder.name,
        "settings": asdict(settings),
        "texts": got.num_texts,
        "positions": positions,
        "covered": round(float((trainer.labels >= 0).float().mean()), 4),
        "untrained_accuracy": untrained["accuracy"],
        "history": history,
    }
    save_heads(out, trainer, figures)
    heads = Heads.load(out, got.model)  # what is measured is what was saved
    count = min(RANKS, len(trainer.token_map))
    figures["held_out"] = measure(lambda x: heads.top(x.to(got.model.device), count).cpu(), got.held_out)
    save_heads(out, trainer, figures)
    return {**figures, "seconds": got.seconds, "file": str(out), "bytes": out.stat().st_size}


def default_out(name: str) -> Path:
    """Beside the models, in the first of their folders that exists: where the heads are looked for."""
    folders = weights_folders()
    folder = next((folder for folder in folders if folder.is_dir()), folders[-1])
    return folder / "heads" / f"{name}.safetensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    text = "Train Medusa heads, which guess several of a model's next tokens at once."
    parser = new_parser("heads", text, Settings)
    parser.add_argument("--out", type=Path, help="default: weights/heads/NAME.safetensors")
    return run_command(parser.parse_args(argv), "heads", run)
