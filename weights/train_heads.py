"""Train parallel heads (Medusa, Cai et al., 2024, arXiv 2401.10774) for a model, which stays as it is.

    python weights/train_heads.py --model NAME [--out FILE] [--tokens N] [--prompts FILE.jsonl] ...

Three stages, each resumable: whatever the work folder holds is not done again, and training goes on from
its last checkpoint to the result it would have had.

1. text      the model writes it itself (`corpus.py`)
2. hidden    one pass of the model over each text; hidden states go to a file per round of texts
3. training  head i is to foresee, from the hidden state at position t, the token at t + 2 + i

A head begins as the model's own (W = 0) and keeps its lm_head, restricted to the tokens that the text has
most often, so that the result is small: `nanospec/heads.py` says what is in the file. Its metadata hold
the settings and what was measured on texts left out of training, one in `HELD_OUT`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import read_prompts, write_texts
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from training import (
    WARMUP,
    WINDOW,
    Data,
    FrozenCrossEntropy,
    TrainError,
    cached_hidden,
    choose_vocab,
    claim,
    split,
    whole_file,
)

from nanospec import LLM, SpecConfig
from nanospec.config import check_number
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.models.heads import Heads
from nanospec.models.hub import resolve_model
from nanospec.models.token_map import TOKEN_MAP, lm_head_rows

RUN = 32  # consecutive positions that a batch takes together: they share the model's distributions
PIECE = {"cpu": 256, "cuda": 4096}  # positions of a batch whose logits exist at once
DECAY = 0.8  # weight of head i in the loss: DECAY ** i, as in the paper
CHECKPOINT_SECONDS = 60.0
RANKS = 10  # guesses per head whose accuracy is measured
EVAL_ROWS = 512  # at once


@dataclass(frozen=True)
class Settings:
    """What determines the result, given the text and the number of threads.

    Attributes:
        vocab: how many tokens may be guessed, 0 for all.
        batch: positions per step.
        labels: what heads learn: "soft" is the model's own distribution at the position they foresee
            (Hinton et al., 2015), "hard" the token that stands there.
    """

    num_heads: int = 4
    num_layers: int = 2
    vocab: int = 8192
    epochs: int = 4
    batch: int = 1024
    lr: float = 3e-3
    weight_decay: float = 0.0
    labels: str = "soft"
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("num_heads", self.num_heads, 1, 16)
        check_number("num_layers", self.num_layers, 1, 8)
        check_number("vocab", self.vocab, 0)
        check_number("epochs", self.epochs, 1)
        check_number("batch", self.batch, RUN)
        check_number("lr", self.lr, 0, 1, float)
        check_number("weight_decay", self.weight_decay, 0, 10, float)
        check_number("seed", self.seed, 0, 2**31 - 1)
        if self.labels not in ("soft", "hard"):
            raise ValueError(f"labels={self.labels!r} must be 'soft' or 'hard'.")

    def key(self, positions: int) -> str:
        """A short name that differs between settings and amounts of text."""
        return hashlib.sha256(f"{positions} {self}".encode()).hexdigest()[:8]


class Trainer:
    """The heads in training: weights [num_heads, num_layers, H, H], biases [num_heads, num_layers, H].

    `step_number` counts the steps done; everything else that matters for going on is in the optimizer.
    """

    def __init__(self, model: Model, settings: Settings, train: Data, token_map: Tensor) -> None:
        self.settings, self.train, self.token_map = settings, train, token_map
        self.device = model.device
        self.dtype = model.dtype  # of the products; weights and sums are float32
        hidden = model.config.hidden_size
        shape = (settings.num_heads, settings.num_layers, hidden)
        self.weight = torch.zeros(*shape, hidden, device=self.device, requires_grad=True)
        self.bias = torch.zeros(shape, device=self.device, requires_grad=True)
        self.optimizer = torch.optim.AdamW(
            [self.weight, self.bias], settings.lr, (0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.projection = lm_head_rows(model, token_map.to(self.device)).contiguous()  # [Vd, H]
        self.vocab_size = model.config.vocab_size
        index = torch.full((self.vocab_size,), -1)
        index[token_map] = torch.arange(len(token_map))
        self.labels = index[train.tokens]  # [R], -1 outside the map
        self.runs = max(len(train.tokens) // RUN, 1)
        self.steps_per_epoch = max(self.runs * RUN // settings.batch, 1)
        self.num_steps = settings.epochs * self.steps_per_epoch
        self.step_number = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """The heads' states before the projection: [N, H] -> [num_heads, N, H] float32."""
        x = hidden.float().expand(self.settings.num_heads, -1, -1)
        weight = self.weight.to(self.dtype)
        for layer in range(self.settings.num_layers):
            update = x.to(self.dtype) @ weight[:, layer].mT
            x = x + F.silu(update.float() + self.bias[:, layer, None])
        return x

    def step(self) -> float:
        """One step on the next batch; returns the loss per head and position."""
        settings, n = self.settings, self.settings.num_heads
        rows = self._rows()  # [C, RUN + n + 1]
        ahead = 2 + torch.arange(n)[:, None, None]
        labels = self.labels[torch.stack([rows[:, 2 + i : 2 + i + RUN] for i in range(n)])]  # [n, C, RUN]
        valid = (labels >= 0) & (self.train.left[rows[:, :RUN]] >= ahead)
        decay = DECAY ** torch.arange(n)
        weights = valid * (decay / valid.sum((1, 2)).clamp(min=1))[:, None, None]
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * self._schedule()
        self.optimizer.zero_grad()
        loss = 0.0
        piece = PIECE[self.device.type] // RUN
        for part in (slice(start, start + piece) for start in range(0, len(rows), piece)):
            hidden = self.train.hidden[rows[part, : RUN + n]].to(self.device)  # [c, RUN + n, H]
            loss += self._backward(hidden, labels[:, part].to(self.device), weights[:, part].to(self.device))
        torch.nn.utils.clip_grad_norm_([self.weight, self.bias], 1.0)
        self.optimizer.step()
        self.step_number += 1
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

    def _rows(self) -> Tensor:
        """Rows of the next batch: runs of RUN positions in an order of each epoch's own, and what follows."""
        epoch, step = divmod(self.step_number, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.settings.seed * 1000 + epoch)
        order = torch.randperm(self.runs, generator=generator)
        shift = int(torch.randint(RUN, (1,), generator=generator))
        count = max(self.settings.batch // RUN, 1)
        start = order[step * count : (step + 1) * count] * RUN + shift
        rows = start[:, None] + torch.arange(RUN + self.settings.num_heads + 1)
        return rows.clamp(max=len(self.train.tokens) - 1)

    def _schedule(self) -> float:
        """Linear warmup, then half a cosine."""
        warmup = max(int(WARMUP * self.num_steps), 1)
        if self.step_number < warmup:
            return (self.step_number + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (self.step_number - warmup) / max(self.num_steps - warmup, 1))

    def guess(self, hidden: Tensor) -> Tensor:
        """The RANKS likeliest tokens of each head, likeliest first: [N, H] -> [N, num_heads, RANKS]."""
        with torch.no_grad():
            states = self.forward(hidden.to(self.device)).to(self.dtype)
            logits = (states @ self.projection.T).transpose(0, 1)
            return self.token_map[logits.topk(min(RANKS, logits.shape[-1])).indices.cpu()]

    def state(self) -> dict[str, Any]:
        return {
            "weight": self.weight.detach(),
            "bias": self.bias.detach(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step_number,
        }

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            self.bias.copy_(state["bias"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_number = state["step"]


def measure(guess: Callable[[Tensor], Tensor], data: Data) -> dict[str, Any]:
    """How often guesses are right on the answers in `data`.

    Gives, for all answers and for the greedy and the sampled ones:
        accuracy: of each head's first guess. A token outside the vocabulary of the guesses is a miss.
        accuracy_by_rank: of each head's first, second, ... guess.
        tokens_per_step: of a chain of the first guesses, the target's own token included, when each step
            begins where the last one ended.
        positions: how many were measured for the first head.
    """
    guesses = torch.cat([guess(part) for part in data.hidden.split(EVAL_ROWS)])  # [R, n, RANKS]
    n = guesses.shape[1]
    ahead = torch.arange(len(data.tokens))[:, None] + 2 + torch.arange(n)
    label = data.tokens[ahead.clamp(max=len(data.tokens) - 1)]
    exists = data.left[:, None] >= 2 + torch.arange(n)
    right = (guesses == label[..., None]) & exists[..., None]  # [R, n, RANKS]
    chain = right[..., 0].long().cumprod(1).sum(1).tolist()
    figures: dict[str, Any] = {}
    for name in ("all", "greedy", "sampled"):
        answer = torch.zeros(len(data.tokens), dtype=torch.bool)
        steps = tokens = 0
        for _, begin, end, text in data.texts:
            if name != "all" and (text.temperature == 0) != (name == "greedy"):
                continue
            answer[begin:end] = True
            row = begin
            while row < end - 1:  # the target's own token is drawn from this row
                steps += 1
                row += 1 + chain[row]
            tokens += row - begin
        counted = (exists & answer[:, None]).sum(0).clamp(min=1)
        by_rank = (right & answer[:, None, None]).sum(0) / counted[:, None]  # [n, RANKS]
        figures[name] = {
            "accuracy": [round(float(value), 4) for value in by_rank[:, 0]],
            "accuracy_by_rank": [[round(float(v), 4) for v in row] for row in by_rank],
            "tokens_per_step": round(tokens / max(steps, 1), 3),
            "positions": int(counted[0]),
        }
    return figures


def train(trainer: Trainer, held_out: Data, path: Path) -> list[dict[str, Any]]:
    """Train to the end, from the checkpoint at `path` if it is there.

    Gives the history: loss, held-out tokens per step and accuracies after each epoch.
    """
    history: list[dict[str, Any]] = []
    losses: list[float] = []
    if path.is_file():
        state = torch.load(path, map_location=trainer.device, weights_only=True)
        trainer.restore(state)
        history, losses = state["history"], state["losses"]

    def save() -> None:
        with whole_file(path) as temporary:
            torch.save({**trainer.state(), "history": history, "losses": losses}, temporary)

    saved = time.monotonic()
    with tqdm(
        total=trainer.num_steps, initial=trainer.step_number, unit="step", desc="training", disable=None
    ) as bar:
        while trainer.step_number < trainer.num_steps:
            losses.append(trainer.step())
            bar.update()
            if trainer.step_number % trainer.steps_per_epoch == 0:
                figures = measure(trainer.guess, held_out)["all"]
                epoch = {
                    "epoch": trainer.step_number // trainer.steps_per_epoch,
                    "loss": round(sum(losses) / len(losses), 4),
                    "tokens_per_step": figures["tokens_per_step"],
                    "accuracy": figures["accuracy"],
                }
                losses.clear()
                history.append(epoch)
                tqdm.write(json.dumps(epoch))
                save()
            elif time.monotonic() - saved > CHECKPOINT_SECONDS:
                save()
                saved = time.monotonic()
    return history


def save_heads(path: Path, trainer: Trainer, metadata: dict[str, Any]) -> None:
    """Write the heads in bf16, without projections: they are the target's."""
    tensors = {}
    if len(trainer.token_map) < trainer.vocab_size:
        tensors[TOKEN_MAP] = trainer.token_map.int()
    for head in range(trainer.settings.num_heads):
        for layer in range(trainer.settings.num_layers):
            for name, values in (("weight", trainer.weight), ("bias", trainer.bias)):
                part = values.detach()[head, layer].to("cpu", torch.bfloat16).contiguous()
                tensors[f"{head}.{layer}.linear.{name}"] = part
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        save_file(tensors, temporary, {"nanospec": json.dumps(metadata)})


# The command.


def run(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """All stages; returns the figures."""
    folder = resolve_model(args.model)
    out = args.out or Path(__file__).resolve().parent / "heads" / f"{folder.name}.safetensors"
    work = args.work or out.parent / f".{out.stem}-work"
    if out.suffix != ".safetensors":
        raise TrainError(f"--out {out} must end in .safetensors.")
    prompts = read_prompts(args.prompts) if args.prompts else None
    claim(work, folder, args.prompts, settings.seed)
    seconds, start = {}, time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[stage], start = round(now - start, 1), now

    window = min(WINDOW, ModelConfig.from_path(folder).max_position_embeddings)
    llm = LLM(folder, spec=SpecConfig(method="none"), max_num_seqs=args.max_num_seqs, max_model_len=window)
    rounds = write_texts(llm, work / "text", args.tokens, settings.seed, prompts)
    model = llm.engine.model
    del llm  # and its KV cache
    lap("text")
    train_data, held_out = split(rounds, cached_hidden(model, rounds, work / "hidden"))
    lap("hidden")
    token_map = choose_vocab(train_data, settings.vocab, model.config.vocab_size)
    trainer = Trainer(model, settings, train_data, token_map)
    untrained = measure(trainer.guess, held_out)["all"]
    history = train(trainer, held_out, work / f"training-{settings.key(len(train_data.tokens))}.pt")
    lap("training")
    figures = {
        "model": folder.name,
        "settings": asdict(settings),
        "texts": sum(map(len, rounds)),
        "positions": len(train_data.tokens),
        "covered": round(float((trainer.labels >= 0).float().mean()), 4),
        "untrained_accuracy": untrained["accuracy"],
        "history": history,
    }
    save_heads(out, trainer, figures)
    heads = Heads.load(out, model)  # what is measured is what was saved
    count = min(RANKS, len(token_map))
    figures["held_out"] = measure(lambda part: heads.top(part.to(model.device), count).cpu(), held_out)
    save_heads(out, trainer, figures)
    return {**figures, "seconds": seconds, "file": str(out), "bytes": out.stat().st_size}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Train parallel heads that guess several of a model's next tokens at once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder, a name below weights/, or a hub id")
    parser.add_argument("--out", type=Path, help="default: weights/heads/NAME.safetensors")
    parser.add_argument("--work", type=Path, help="for resuming; default: a hidden folder beside --out")
    parser.add_argument("--prompts", type=Path, help="JSON lines to answer; default: the model invents them")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of text to write at least")
    parser.add_argument("--num-heads", type=int, default=default.num_heads)
    parser.add_argument("--num-layers", type=int, default=default.num_layers, help="blocks per head")
    parser.add_argument("--vocab", type=int, default=default.vocab, help="tokens that are guessed; 0: all")
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--batch", type=int, default=default.batch, help="positions per step")
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--weight-decay", type=float, default=default.weight_decay)
    parser.add_argument("--labels", default=default.labels, help="soft: the model's distribution; hard: text")
    parser.add_argument("--max-num-seqs", type=int, default=96, help="texts written at once")
    parser.add_argument("--seed", type=int, default=default.seed)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_number("--tokens", args.tokens, 1)
        settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
        figures = run(args, settings)
    except (ValueError, OSError) as error:
        print(f"Cannot train heads for {args.model}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
