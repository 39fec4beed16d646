"""Train a small draft model for a model: a few of its layers, taught to write what the whole writes.

    python weights/train_draft.py --model NAME --out FOLDER [--layers N] [--work DIR] [--tokens N] ...

The result is an ordinary model folder with the target's tokenizer, embedding and lm_head, for
`--spec draft --draft-model FOLDER`. Three stages, each resumable; the first two are those of
`train_heads.py`, and both programs may share a work folder:

1. text      the target writes it itself (`corpus.py`)
2. hidden    the target's hidden states on that text, from which its own distributions follow
3. training  the layers learn these distributions (Hinton et al., 2015, arXiv 1503.02531)

The vocabulary is most of the work of so small a model. A step therefore compares the two distributions over
some tokens only: the most frequent ones, those of the batch, and `OTHERS` drawn anew for each step, lest
the rest, which no step would ever lower, come out on top.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import Text, read_prompts, write_texts
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
    first_row,
    split,
    whole_file,
)

from nanospec import LLM, SpecConfig
from nanospec.config import check_number
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.models.hub import resolve_model
from nanospec.models.token_map import TOKEN_MAP, lm_head_rows

OTHERS = 1024  # tokens compared besides the frequent ones
WEIGHT_DECAY = 0.1
CHECKPOINT_SECONDS = 60.0
LOSS_ROWS = 512  # positions whose logits exist at once
LENGTHS = (1, 2, 3)  # speculation lengths K for which tokens per step are foretold
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def option(default: Any, text: str) -> Any:
    """A field that is also an option of the command."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """What determines the result, given the text and the number of threads."""

    layers: int = option(2, "layers of the draft: the first ones of the model and as many last ones")
    vocab: int = option(4096, "most frequent tokens that every step compares; 0: all")
    epochs: int = option(9, "passes over the text")
    batch: int = option(512, "tokens per step, padding included")
    lr: float = option(2e-3, "highest learning rate")
    seed: int = option(0, "of the text and of the order of batches")

    def __post_init__(self) -> None:
        for name, low in (("layers", 1), ("vocab", 0), ("epochs", 1), ("batch", 1), ("seed", 0)):
            check_number(name, getattr(self, name), low)
        check_number("lr", self.lr, 0, 1, float)


def take_layers(folder: Path, count: int) -> Any:
    """The model in `folder` with `count` of its layers, in float32, as transformers' module.

    Half of them are its first ones, the others its last: those read the embedding, these write for lm_head.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise TrainError("training a draft model needs transformers: pip install transformers.") from None
    total = ModelConfig.from_path(folder).num_layers
    if count > total:
        raise TrainError(f"layers={count} are too many; {folder.name} has {total}.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    draft = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    chosen = [*range(-(-count // 2)), *range(total - count // 2, total)]
    draft.model.layers = torch.nn.ModuleList(draft.model.layers[i] for i in chosen)
    draft.config.num_hidden_layers = count
    if getattr(draft.config, "layer_types", None):
        draft.config.layer_types = [draft.config.layer_types[i] for i in chosen]
    draft.requires_grad_(False)
    draft.model.layers.requires_grad_(True)
    draft.model.norm.requires_grad_(True)
    return draft.float()


class Trainer:
    """The draft in training; `step_number` counts the steps done."""

    def __init__(self, target: Model, draft: Any, settings: Settings, train: Data) -> None:
        self.settings, self.train = settings, train
        self.device, self.dtype = target.device, target.dtype  # of the products
        self.draft = draft.to(self.device)
        self.weights = {n: w for n, w in draft.named_parameters() if w.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), settings.lr, (0.9, 0.95), weight_decay=WEIGHT_DECAY
        )
        self.vocab_size = target.config.vocab_size
        self.frequent = choose_vocab(train, settings.vocab, self.vocab_size)
        self.lm_head = lm_head_rows(target, torch.arange(self.vocab_size, device=self.device))  # [V, H]
        self.batches = bucket(train, settings.batch)
        self.num_steps = settings.epochs * len(self.batches)
        self.step_number = 0

    def forward(self, texts: Sequence[Text]) -> Tensor:
        """Hidden states at `first_row(text)` and after, all but the last, of all texts: [N, H] float32."""
        parts = [torch.tensor(text.ids[:-1]) for text in texts]
        ids = pad_sequence(parts, batch_first=True).to(self.device)  # what pads follows, so none sees it
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.draft.model(input_ids=ids, use_cache=False).last_hidden_state
        return torch.cat([row[first_row(text) : len(text.ids) - 1] for row, text in zip(hidden, texts)])

    def step(self) -> float:
        """One step on the next batch; returns the loss per position."""
        epoch, number = divmod(self.step_number, len(self.batches))
        generator = torch.Generator().manual_seed(self.settings.seed * 1000 + epoch)
        order = torch.randperm(len(self.batches), generator=generator)
        batch = [self.train.texts[i] for i in self.batches[order[number]]]
        above = torch.cat([self.train.hidden[row : end - 1] for row, _, end, _ in batch])
        tokens = self._tokens(torch.cat([self.train.tokens[row:end] for row, _, end, _ in batch]))
        projection = self.lm_head[tokens.to(self.device)].to(self.dtype)  # [Vs, H]
        hidden = self.forward([text for *_, text in batch])
        loss = torch.zeros((), device=self.device)
        for x, theirs in zip(hidden.split(LOSS_ROWS), above.split(LOSS_ROWS)):
            wanted = (theirs.to(self.device, self.dtype) @ projection.T).float().softmax(-1)
            weight = torch.full((len(x),), 1 / len(hidden), device=self.device)
            loss = loss + FrozenCrossEntropy.apply(x, projection, wanted, weight)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self._schedule()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        self.step_number += 1
        return float(loss.detach())

    def _tokens(self, present: Tensor) -> Tensor:
        """The tokens that a step compares, ascending; `present` are those of its texts."""
        generator = torch.Generator().manual_seed(self.step_number)
        chosen = torch.zeros(self.vocab_size, dtype=torch.bool)
        chosen[torch.randint(self.vocab_size, (OTHERS,), generator=generator)] = True
        chosen[self.frequent] = True
        chosen[present] = True
        return chosen.nonzero().squeeze(1)

    def _schedule(self) -> float:
        """Linear warmup, then half a cosine."""
        warmup = max(int(WARMUP * self.num_steps), 1)
        if self.step_number < warmup:
            return (self.step_number + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (self.step_number - warmup) / max(self.num_steps - warmup, 1))

    def state(self) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict(), "step": self.step_number}

    def restore(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["weights"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_number = state["step"]


def bucket(data: Data, size: int) -> list[list[int]]:
    """Texts of like length together, at most `size` tokens with their padding, by their number."""
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(data.texts)), key=lambda i: len(data.texts[i][3].ids)):
        if batches[-1] and (len(batches[-1]) + 1) * len(data.texts[i][3].ids) > size:
            batches.append([])
        batches[-1].append(i)
    return batches


class Exam:
    """Measures a draft on the answers of texts held out, always after the true text so far.

    loss: cross entropy with the text.
    agreement: how often its likeliest token is the target's; and that in the greedy texts alone.
    tokens_per_step: by K; what greedy decoding emits if the draft is right where it agrees.
    """

    def __init__(self, trainer: Trainer, data: Data) -> None:
        self.trainer, self.data = trainer, data
        self.best = [self._judge(data.hidden[begin : end - 1])[0] for _, begin, end, _ in data.texts]

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        steps, right, loss = dict.fromkeys(LENGTHS, 0), {True: [0, 0], False: [0, 0]}, 0.0
        for best, (row, begin, end, text) in zip(self.best, self.data.texts):
            hidden = self.trainer.forward([text])[begin - row :]
            own, part = self._judge(hidden, self.data.tokens[begin + 1 : end])
            loss += part
            good = (own == best).tolist()
            right[text.temperature == 0][0] += sum(good)
            right[text.temperature == 0][1] += len(good)
            for k in LENGTHS:
                place = 0
                while place < len(good):
                    steps[k] += 1
                    place += ([*good[place : place + k], False]).index(False) + 1
        hits, total = (right[True][i] + right[False][i] for i in range(2))
        return {
            "loss": round(loss / total, 4),
            "agreement": round(hits / total, 4),
            "agreement_greedy": round(right[True][0] / max(right[True][1], 1), 4),
            "tokens_per_step": {k: round(total / max(count, 1), 3) for k, count in steps.items()},
        }

    def _judge(self, hidden: Tensor, labels: Tensor | None = None) -> tuple[Tensor, float]:
        """The likeliest token of the whole vocabulary at each position, and the summed loss of `labels`."""
        lm_head = self.trainer.lm_head
        logits = (hidden.to(lm_head.device, lm_head.dtype) @ lm_head.T).float()
        loss = 0.0 if labels is None else F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
        return logits.argmax(-1), float(loss)


def train(trainer: Trainer, exam: Exam, path: Path) -> list[dict[str, Any]]:
    """Train to the end, from the checkpoint at `path` if it is there. Gives the figures of each epoch."""
    history: list[dict[str, Any]] = []
    losses: list[float] = []
    if path.is_file():
        state = torch.load(path, map_location=trainer.device, weights_only=True)
        trainer.restore(state)
        history, losses = state["history"], state["losses"]
    total, begun, saved = trainer.num_steps, trainer.step_number, time.monotonic()
    with tqdm(total=total, initial=begun, unit="step", desc="training", disable=None) as bar:
        while trainer.step_number < total:
            losses.append(trainer.step())
            bar.update()
            epoch, rest = divmod(trainer.step_number, len(trainer.batches))
            if rest == 0:
                mean = round(sum(losses) / len(losses), 4)
                history.append({"epoch": epoch, "training_loss": mean, **exam()})
                losses.clear()
                tqdm.write(json.dumps(history[-1]))
            if rest == 0 or time.monotonic() - saved > CHECKPOINT_SECONDS:
                with whole_file(path) as temporary:
                    torch.save({**trainer.state(), "history": history, "losses": losses}, temporary)
                saved = time.monotonic()
    return history


def save_draft(draft: Any, target: Path, out: Path, figures: dict[str, Any], token_map: Tensor) -> None:
    """Write the draft as a model folder, which appears when it is complete. `token_map` [Vd]: the tokens that
    it is to guess."""
    scratch = out.with_name(f".{out.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    draft.to(ModelConfig.from_path(target).torch_dtype).save_pretrained(scratch)
    for name in COPIED:
        if (target / name).is_file():
            shutil.copy(target / name, scratch)
    (scratch / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    save_file({TOKEN_MAP: token_map.int()}, scratch / f"{TOKEN_MAP}.safetensors")
    scratch.rename(out)


def run(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """All stages; returns the figures."""
    folder, out, start = resolve_model(args.model), args.out, time.perf_counter()
    if out.exists():
        raise TrainError(f"--out {out} exists already; delete it or name another folder.")
    draft = take_layers(folder, settings.layers)
    work = args.work or out.with_name(f".{out.name}-work")
    prompts = read_prompts(args.prompts) if args.prompts else None
    claim(work, folder, args.prompts, settings.seed)
    window = min(WINDOW, ModelConfig.from_path(folder).max_position_embeddings)
    llm = LLM(folder, spec=SpecConfig(method="none"), max_num_seqs=args.max_num_seqs, max_model_len=window)
    rounds = write_texts(llm, work / "text", args.tokens, settings.seed, prompts)
    target = llm.engine.model
    del llm  # and its KV cache
    train_data, held_out = split(rounds, cached_hidden(target, rounds, work / "hidden"))
    trainer = Trainer(target, draft, settings, train_data)
    exam = Exam(trainer, held_out)
    positions, began = len(train_data.tokens), time.perf_counter()
    key = hashlib.sha256(f"{positions} {settings}".encode()).hexdigest()[:8]
    history = train(trainer, exam, work / f"draft-{key}.pt")
    seconds = {"text": round(began - start, 1), "training": round(time.perf_counter() - began, 1)}
    about = {"model": folder.name, "settings": asdict(settings), "positions": positions, "history": history}
    save_draft(draft, folder, out, about, trainer.frequent)
    size = (out / "model.safetensors").stat().st_size
    return {**about, "seconds": seconds, "file": str(out), "bytes": size}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Train a small draft model for a model, from a few of its layers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder, a name below weights/, or a hub id")
    parser.add_argument("--out", required=True, type=Path, help="the draft's folder, which must not exist")
    parser.add_argument("--work", type=Path, help="for resuming; default: a hidden folder beside --out")
    parser.add_argument("--prompts", type=Path, help="JSON lines to answer; default: the model invents them")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of text to write at least")
    parser.add_argument("--max-num-seqs", type=int, default=96, help="texts written at once")
    for each in fields(Settings):
        kind, text = type(each.default), each.metadata["help"]
        parser.add_argument(f"--{each.name}", type=kind, default=each.default, help=text)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_number("--tokens", args.tokens, 1)
        figures = run(args, Settings(**{each.name: getattr(args, each.name) for each in fields(Settings)}))
    except (ValueError, OSError) as error:
        print(f"Cannot train a draft model for {args.model}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
