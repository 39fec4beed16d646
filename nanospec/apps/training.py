"""Train Medusa heads (Cai et al., 2024, arXiv 2401.10774) for a model, whose own weights do not change.

    nanospec train --model NAME --text FILE.jsonl [--out FILE.safetensors] [--epochs N] ...

A line of the text is {"text": ...} or {"messages": [...]}, a conversation including the answers. Answers
written by the model itself work best, because these are what the heads have to predict.

Head i learns to predict, from the hidden state at position t, the model's distribution of the token at
t + 2 + i (distillation: Hinton et al., 2015, arXiv 1503.02531). That is computed from the hidden state at
t + 1 + i, so the model runs only once over the text. A head starts as the identity (W = 0) and uses the
model's lm_head, restricted to the most frequent tokens of the text. The file (see `drafters/medusa.py`) is
written after every epoch; its metadata contains the settings and the accuracy on held-out texts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from ..device.resources import resolve_device
from ..drafters.medusa import TOKEN_MAP, Heads, lm_head_rows
from ..kernels.batch import Batch, Chunk
from ..kernels.table import Table
from ..models import program, resolve_model, weights_folders
from ..models.decoder import Model
from ..models.families import read_config
from ..models.weights import load_model
from ..text import bounded_field, check_fields
from ..text.chat import check_conversation
from ..text.tokenizer import Tokenizer
from .batch.lines import LineError, line_name, read_lines
from .json_input import strict_json
from .options import Parser, add_settings, fields_set, in_flags

WINDOW = 1024  # tokens; longer texts are truncated
HELD_OUT = 16  # one of this many texts is held out for measuring
FORWARD_TOKENS = 2048  # per forward pass of the model
BLOCK_SIZE = 16
RUN = 32  # consecutive positions trained together, as neighbouring positions share the model's distributions
LOSS_RUNS = {"cpu": 8, "cuda": 128}  # runs whose logits are in memory at once
DECAY = 0.8  # weight of head i in the loss: DECAY ** i, as in the paper
BETAS, WARMUP, MAX_NORM = (0.9, 0.95), 0.05, 1.0  # of AdamW, share of all steps, of the gradient


@dataclass(frozen=True)
class Settings:
    """Training settings. With the text and the number of threads, they determine the heads.

    Attributes:
        num_heads: number of heads, that is, tokens to predict ahead.
        num_layers: number of residual blocks per head.
        vocab: number of tokens that can be predicted, the most frequent ones; 0 for all.
        epochs: number of passes over the text.
        batch: number of positions per optimizer step.
        lr: peak learning rate.
        seed: seed for the order of the batches.
    """

    num_heads: int = bounded_field(4, 1, 16)
    num_layers: int = bounded_field(2, 1, 8)
    vocab: int = bounded_field(8192, 0)
    epochs: int = bounded_field(4, 1)
    batch: int = bounded_field(1024, RUN)
    lr: float = bounded_field(3e-3, 0, 1)
    seed: int = bounded_field(0, 0, 2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)


class Data(NamedTuple):
    """R positions of concatenated texts: hidden states [R, H] on the CPU, the token at each position [R]
    int64, and the number of positions that follow it in the same text [R] int64."""

    hidden: Tensor
    tokens: Tensor
    num_following: Tensor


def read_texts(file: Path, tokenizer: Tokenizer, window: int) -> list[list[int]]:
    """Return the token ids of each line of a file, truncated to `window`. Raises LineError."""
    texts = []
    for number, line in read_lines(str(file)):
        try:
            value: Any = strict_json(line)
            if isinstance(value, dict) and "messages" in value:
                check_conversation(value["messages"])
                text = tokenizer.apply_chat_template(value["messages"], add_generation_prompt=False)
                ids = tokenizer.encode(text, add_special_tokens=False)
            elif isinstance(value, dict) and isinstance(value.get("text"), str):
                ids = tokenizer.encode(value["text"])
            else:
                raise ValueError('a line must be {"text": "..."} or {"messages": [...]}.')
        except ValueError as error:
            raise LineError(f"{line_name(str(file), number)}: {error}") from None
        texts.append(ids[:window])
    return [ids for ids in texts if len(ids) > 1]


@torch.inference_mode()
def compute_data(model: Model, texts: Sequence[list[int]]) -> Data:
    """Compute the hidden states of texts, in forward passes of about `FORWARD_TOKENS` tokens."""
    passes: list[list[list[int]]] = []
    for ids in texts:
        if not passes or sum(map(len, passes[-1])) + len(ids) > FORWARD_TOKENS:
            passes.append([])
        passes[-1].append(ids)
    parts = [_forward(model, each) for each in tqdm(passes, unit="pass", desc="hidden states", disable=None)]
    following = [torch.arange(len(ids)).flip(0) for ids in texts]
    return Data(torch.cat(parts), torch.tensor(list(chain.from_iterable(texts))), torch.cat(following))


def _forward(model: Model, texts: Sequence[list[int]]) -> Tensor:
    table = Table.empty(len(texts), max(map(len, texts)), BLOCK_SIZE, 0, model.device)
    num_blocks = table.block_table.numel()
    table.block_table.copy_(torch.arange(num_blocks).view_as(table.block_table))
    for row, ids in enumerate(texts):
        table.tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    batch = Batch.from_chunks(table, [Chunk(row, 0, len(ids)) for row, ids in enumerate(texts)])
    return model.forward(batch, model.allocate_kv_cache(num_blocks, BLOCK_SIZE)).cpu()


class HeadsInTraining:
    """Trainable float32 weights [num_heads, num_layers, H, H] and biases [num_heads, num_layers, H], and the
    predicted tokens [Vd] int64, in ascending order."""

    def __init__(self, model: Model, settings: Settings, tokens: Tensor) -> None:
        self.settings, self.device, self.dtype = settings, model.device, model.dtype  # dtype of the matmuls
        hidden, vocab_size = model.config.hidden_size, model.config.vocab_size
        shape = (settings.num_heads, settings.num_layers, hidden)
        self.weight = torch.zeros(*shape, hidden, device=self.device, requires_grad=True)
        self.bias = torch.zeros(shape, device=self.device, requires_grad=True)
        counts = torch.bincount(tokens, minlength=vocab_size)
        frequent = counts.argsort(descending=True, stable=True)[: settings.vocab or vocab_size]
        self.token_map = frequent.sort().values
        self.projection = lm_head_rows(model, self.token_map.to(self.device)).contiguous()  # [Vd, H]

    def states(self, hidden: Tensor) -> Tensor:
        """Return the heads' states before the projection: [N, H] -> [num_heads, N, H] float32."""
        x = hidden.float().expand(self.settings.num_heads, -1, -1)
        weight = self.weight.to(self.dtype)
        for layer in range(self.settings.num_layers):
            update = x.to(self.dtype) @ weight[:, layer].mT
            x = x + F.silu(update.float() + self.bias[:, layer, None])
        return x

    def backward(self, data: Data, starts: Tensor) -> float:
        """Add the gradient of the loss over the runs that start at `starts` [C] int64; return the loss."""
        n = self.settings.num_heads
        rows = starts[:, None] + torch.arange(RUN + n)  # [C, RUN + n]
        ahead = 1 + torch.arange(n)[:, None, None]
        valid = (data.num_following[rows[:, :RUN]] >= ahead).float()  # [n, C, RUN]
        decay = DECAY ** torch.arange(n)
        weights = valid * (decay / valid.sum((1, 2)).clamp(min=1))[:, None, None] / decay.sum()
        total, size = 0.0, LOSS_RUNS[self.device.type]
        for part, weight in zip(rows.split(size), weights.to(self.device).split(size, 1)):
            hidden = data.hidden[part].to(self.device)  # [c, RUN + n, H]
            with torch.no_grad():
                p = (hidden[:, 1:].to(self.dtype) @ self.projection.T).float().softmax(-1)
            labels = torch.stack([p[:, i : i + RUN].flatten(0, 1) for i in range(n)])  # [n, c * RUN, Vd]
            states = self.states(hidden[:, :RUN].flatten(0, 1)).to(self.dtype)
            log_p = (states @ self.projection.T).float().log_softmax(-1)
            loss = -((labels * log_p).sum(-1) * weight.flatten(1)).sum()
            loss.backward()
            total += float(loss.detach())
        return total

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Write the heads in bf16 atomically, without the projections (the target's). Raises OSError."""
        tensors = {TOKEN_MAP: self.token_map.int()} if self.settings.vocab else {}
        for name, values in (("weight", self.weight), ("bias", self.bias)):
            for head, layers in enumerate(values.detach().to("cpu", torch.bfloat16)):
                for layer, part in enumerate(layers):
                    tensors[f"{head}.{layer}.linear.{name}"] = part.clone()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.part")
        try:
            save_file(tensors, new, {"nanospec": json.dumps(metadata)})
            new.chmod(0o644)  # safetensors creates files that only the owner can read
            os.replace(new, path)
        except SafetensorError as error:
            raise OSError(f"could not write {path} ({error}); check the free disk space.") from None
        finally:
            new.unlink(missing_ok=True)


@torch.inference_mode()
def measure(heads: Heads, data: Data, device: torch.device) -> dict[str, Any]:
    """Return the top-1 accuracy of each head, and the mean tokens per step with chains of their top-1 drafts,
    including the target's own token."""
    best = [heads.logits(hidden.to(device)).argmax(-1) for hidden in data.hidden.split(512)]
    drafts = heads.tokens(torch.cat(best)).cpu()
    ahead, last = 2 + torch.arange(heads.num_heads), len(data.tokens) - 1
    labels = data.tokens[(torch.arange(last + 1)[:, None] + ahead).clamp(max=last)]  # [R, num_heads]
    exists = data.num_following[:, None] >= ahead
    correct = (drafts == labels) & exists
    gained = correct[exists[:, -1]].cumprod(1).sum(1).float().mean()
    accuracy = (correct.sum(0) / exists.sum(0).clamp(min=1)).tolist()
    return {"accuracy": [round(a, 4) for a in accuracy], "tokens_per_step": round(1 + float(gained), 3)}


def train(model: Model, settings: Settings, data: tuple[Data, Data], out: Path) -> dict[str, Any]:
    """Train heads on the first of the `data`; after every epoch, measure them on the second and write them to
    `out`. Return the metadata of that file."""
    training, held_out = data
    heads = HeadsInTraining(model, settings, training.tokens)
    optimizer = torch.optim.AdamW([heads.weight, heads.bias], settings.lr, BETAS, weight_decay=0.0)
    runs = (len(training.tokens) - settings.num_heads) // RUN - 1  # leaves room for a random shift
    if runs < 1:
        raise ValueError(f"the text has {len(training.tokens)} tokens, too few to train on.")
    per_step = settings.batch // RUN
    steps = math.ceil(runs / per_step)
    rate = LambdaLR(optimizer, partial(schedule, settings.epochs * steps))
    generator = torch.Generator().manual_seed(settings.seed)
    figures: dict[str, Any] = {"settings": asdict(settings), "positions": len(training.tokens), "history": []}
    with tqdm(total=settings.epochs * steps, unit="step", desc="training", disable=None) as bar:
        for epoch in range(1, settings.epochs + 1):
            starts = torch.randperm(runs, generator=generator) * RUN
            starts += torch.randint(RUN, (1,), generator=generator)
            losses = []
            for batch in starts.split(per_step):
                optimizer.zero_grad()
                losses.append(heads.backward(training, batch))
                torch.nn.utils.clip_grad_norm_([heads.weight, heads.bias], MAX_NORM)
                optimizer.step()
                rate.step()
                bar.update()
            heads.save(out, figures)
            accuracy = measure(Heads.load(out, model), held_out, model.device)  # measures the saved weights
            figures["history"].append({"epoch": epoch, "loss": round(sum(losses) / steps, 4), **accuracy})
            heads.save(out, figures)
            tqdm.write(json.dumps(figures["history"][-1]), file=sys.stderr)
    return figures


def schedule(steps: int, step: int) -> float:
    """Return the learning rate factor at a step: linear warmup, then cosine decay."""
    warmup = max(int(WARMUP * steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))


def run(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Read the text, compute hidden states and train heads; return the metadata."""
    folder = resolve_model(args.model)
    folders = weights_folders()  # heads are searched in all of these; write to the first that exists
    weights = next((folder for folder in folders if folder.is_dir()), folders[-1])
    out = args.out or weights / "heads" / f"{folder.name}.safetensors"
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {out} must have the suffix .safetensors.")
    (_, config), device = read_config(folder), resolve_device(args.device)
    texts = read_texts(args.text, Tokenizer(folder), min(WINDOW, config.max_position_embeddings))
    training = [ids for i, ids in enumerate(texts) if i % HELD_OUT]
    if not training:
        raise ValueError(f"{args.text} has {len(texts)} texts, too few for training and held-out texts.")
    model = load_model(folder, "auto", device)
    data = compute_data(model, training), compute_data(model, texts[::HELD_OUT])
    return {"model": folder.name, **train(model, settings, data, out), "file": str(out)}


def main(argv: Sequence[str]) -> int:
    """Run `nanospec train`. Raises ValueError or OSError with a one-sentence message."""
    text = "Train Medusa heads, which predict several of a model's next tokens at once."
    parser = Parser(prog=f"{program()} train", description=text)
    parser.add_argument("--model", required=True, help="local folder, GGUF file, name or hub id")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="training data, JSON Lines")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: weights/heads/NAME.safetensors")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_settings(parser, Settings, "training", full=True, defaults={})
    args = parser.parse_args(argv)
    try:
        settings = Settings(**fields_set(args, "Settings"))
    except ValueError as error:
        raise ValueError(in_flags(str(error), (Settings,))) from None
    print(json.dumps(run(args, settings)))
    return 0
