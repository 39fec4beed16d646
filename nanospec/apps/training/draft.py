"""Train a small draft model for a model: a few of its layers, taught to write what the whole writes.

    nanospec train draft --model NAME --out FOLDER [--layers N] [--work DIR] [--tokens N] ...

The result is an ordinary model folder with the target's tokenizer, embedding and lm_head, for
`--spec draft --draft-model FOLDER`. The stages are those of `heads.py`, each resumable, and both may share a
work folder; in the last one the layers learn the target's own distributions (Hinton et al., 2015, arXiv
1503.02531), which follow from its hidden states.

The vocabulary is most of the work of so small a model. A step therefore compares the two distributions over
some tokens only: the most frequent ones, those of the batch, and `OTHERS` drawn anew for each step, lest
the rest, which no step would ever lower, come out on top.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...models.config import ModelConfig
from ...models.decoder import Model
from ...models.hub import resolve_model
from ...models.token_map import TOKEN_MAP, lm_head_rows
from . import loop
from .command import new_parser, prepare, run_command, settings_of, timed
from .corpus import Text
from .data import Data, by_length, first_kept
from .loop import TrainError, option
from .loss import FrozenCrossEntropy, most_frequent

OTHERS = 1024  # tokens compared besides the frequent ones
WEIGHT_DECAY = 0.1
LOSS_ROWS = 512  # positions whose logits exist at once
LENGTHS = (1, 2, 3)  # speculation lengths K for which tokens per step are estimated
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Settings(loop.Settings):
    """As `loop.Settings`."""

    layers: int = option(2, "layers of the draft: the first ones of the model and as many last ones", 1)
    vocab: int = option(4096, "most frequent tokens that every step compares; 0: all", 0)
    epochs: int = option(9, "passes over the text", 1)
    batch: int = option(512, "tokens per step, padding included", 1)
    lr: float = option(2e-3, "highest learning rate", 0, 1)
    seed: int = option(0, "of the text and of the order of batches", 0)


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


class DraftTrainer(loop.Trainer):
    """A draft in training. The items of an epoch are batches of texts of like length."""

    def __init__(self, target: Model, draft: Any, settings: Settings, train: Data, held_out: Data) -> None:
        self.data, self.held_out = train, held_out
        self.device, self.dtype = target.device, target.dtype  # of the products
        self.draft = draft.to(self.device)
        weights = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
        super().__init__(settings, weights, WEIGHT_DECAY)
        self.vocab_size = target.config.vocab_size
        self.frequent = most_frequent(train.tokens, settings.vocab, self.vocab_size)
        self.lm_head = lm_head_rows(target, torch.arange(self.vocab_size, device=self.device))  # [V, H]
        self.batches = by_length([span.text for span in train.spans], settings.batch)
        self.num_items = self.steps_per_epoch = len(self.batches)

    def forward(self, texts: Sequence[Text]) -> Tensor:
        """Hidden states at `first_kept(text)` and after, all but the last, of all texts: [N, H] float32."""
        parts = [torch.tensor(text.ids[:-1]) for text in texts]
        ids = pad_sequence(parts, batch_first=True).to(self.device)  # what pads follows, so none sees it
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.draft.model(input_ids=ids, use_cache=False).last_hidden_state
        return torch.cat([row[first_kept(text) : len(text.ids) - 1] for row, text in zip(hidden, texts)])

    def backward(self, items: Tensor, generator: torch.Generator) -> float:
        spans = [self.data.spans[i] for i in self.batches[int(items)]]
        above = torch.cat([self.data.hidden[span.start : span.end - 1] for span in spans])
        tokens = self._compared(torch.cat([self.data.tokens[span.start : span.end] for span in spans]))
        projection = self.lm_head[tokens.to(self.device)].to(self.dtype)  # [Vs, H]
        hidden = self.forward([span.text for span in spans])
        loss = torch.zeros((), device=self.device)
        for x, theirs in zip(hidden.split(LOSS_ROWS), above.split(LOSS_ROWS)):
            wanted = (theirs.to(self.device, self.dtype) @ projection.T).float().softmax(-1)
            weight = torch.full((len(x),), 1 / len(hidden), device=self.device)
            loss = loss + FrozenCrossEntropy.apply(x, projection, wanted, weight)
        loss.backward()
        return float(loss.detach())

    def _compared(self, present: Tensor) -> Tensor:
        """The tokens that a step compares, ascending; `present` are those of its texts."""
        generator = torch.Generator().manual_seed(self.step_number)
        chosen = torch.zeros(self.vocab_size, dtype=torch.bool)
        chosen[torch.randint(self.vocab_size, (OTHERS,), generator=generator)] = True
        chosen[self.frequent] = True
        chosen[present] = True
        return chosen.nonzero().squeeze(1)

    def evaluate(self, training_loss: float) -> dict[str, Any]:
        return {"training_loss": training_loss, **self.measure()}

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Figures on the answers of texts held out, always after the true text so far.

        loss: cross entropy with the text.
        agreement: how often its likeliest token is the target's; and that in the greedy texts alone.
        tokens_per_step: by K; what greedy decoding emits if the draft is right where it agrees.
        """
        steps, loss = dict.fromkeys(LENGTHS, 0), 0.0
        agreed: dict[bool, list[bool]] = {True: [], False: []}  # by whether the text is greedy
        for best, span in zip(self._best, self.held_out.spans):
            hidden = self.forward([span.text])[span.answer - span.start :]
            labels = self.held_out.tokens[span.answer + 1 : span.end]
            logits = self._logits(hidden)
            loss += float(F.cross_entropy(logits, labels.to(logits.device), reduction="sum"))
            right: list[bool] = (logits.argmax(-1) == best).tolist()
            agreed[span.text.temperature == 0] += right
            for k in LENGTHS:
                place = 0
                while place < len(right):
                    steps[k] += 1
                    place += [*right[place : place + k], False].index(False) + 1
        both = agreed[True] + agreed[False]
        return {
            "loss": round(loss / len(both), 4),
            "agreement": round(sum(both) / len(both), 4),
            "agreement_greedy": round(sum(agreed[True]) / max(len(agreed[True]), 1), 4),
            "tokens_per_step": {k: round(len(both) / max(count, 1), 3) for k, count in steps.items()},
        }

    @cached_property
    def _best(self) -> list[Tensor]:
        """The target's own likeliest tokens where each text held out has its answer."""
        hidden = self.held_out.hidden
        return [self._logits(hidden[s.answer : s.end - 1]).argmax(-1) for s in self.held_out.spans]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Over the whole vocabulary: [N, H] -> [N, V] float32."""
        return (hidden.to(self.lm_head.device, self.lm_head.dtype) @ self.lm_head.T).float()


def save_draft(draft: Any, target: Path, out: Path, figures: dict[str, Any], token_map: Tensor) -> None:
    """Write the draft as a model folder, which appears when it is complete. `token_map` [Vd]: the tokens that
    it is to guess."""
    scratch = out.with_name(f".{out.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        draft.to(ModelConfig.from_path(target).torch_dtype).save_pretrained(scratch)
    except SafetensorError as error:
        raise OSError(f"{scratch} could not be written ({error}); make room and try again.") from error
    for name in COPIED:
        if (target / name).is_file():
            shutil.copy(target / name, scratch)
    (scratch / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    save_file({TOKEN_MAP: token_map.int()}, scratch / f"{TOKEN_MAP}.safetensors")
    scratch.rename(out)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All stages; returns the figures."""
    settings, folder, out = settings_of(args, Settings), resolve_model(args.model), args.out
    if out.exists():
        raise TrainError(f"--out {out} exists already; delete it or name another folder.")
    draft = take_layers(folder, settings.layers)
    work = args.work or out.with_name(f".{out.name}-work")
    got = prepare(args, folder, work)
    trainer = DraftTrainer(got.model, draft, settings, got.train, got.held_out)
    positions = len(got.train.tokens)
    with timed(got.seconds, "training"):
        history = trainer.train(work / f"draft-{settings.key(positions)}.pt")
    about = {"model": folder.name, "settings": asdict(settings), "positions": positions, "history": history}
    save_draft(draft, folder, out, about, trainer.frequent)
    size = (out / "model.safetensors").stat().st_size
    return {**about, "seconds": got.seconds, "file": str(out), "bytes": size}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = new_parser("draft", "Train a small draft model for a model, from a few of its layers.", Settings)
    parser.add_argument("--out", required=True, type=Path, help="the draft's folder, which must not exist")
    return run_command(parser.parse_args(argv), "a draft model", run)
