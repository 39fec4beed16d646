"""The training loop of heads and draft models: order, schedule, optimizer, evaluation and checkpoints.

A step depends on the weights, the optimizer and its own number alone, so training that goes on from a
checkpoint ends at the very weights it would have had.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ...text.checks import check_number, shown

BETAS = (0.9, 0.95)
MAX_NORM = 1.0  # of the gradient
WARMUP = 0.05  # of all steps
CHECKPOINT_SECONDS = 60.0


class TrainError(ValueError):
    """The training cannot run; the message says why."""


def option(default: Any, text: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """A field of `Settings` with its help and limits; it is an option of the command too."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


class Settings:
    """What determines the result, given the text and the number of threads.

    Base of frozen dataclasses whose fields are made by `option`; values beyond a limit are a ValueError.
    """

    epochs: int
    lr: float
    seed: int

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if type(each.default) in (int, float):
                limits = each.metadata["low"], each.metadata["high"]
                check_number(each.name, getattr(self, each.name), *limits, type(each.default))

    def key(self, positions: int) -> str:
        """A short name that differs between settings and amounts of text."""
        return hashlib.sha256(f"{positions} {self}".encode()).hexdigest()[:8]


class Trainer(ABC):
    """Weights in training. A subclass knows the loss and how the result is measured.

    Each epoch goes through `num_items` in a new order, `items_per_step` at a time, for `steps_per_epoch`.

    Attributes:
        weights: what is trained, float32, by name; changed in place.
        num_steps, step_number: of the whole training; done so far.
    """

    num_items: int
    items_per_step = 1
    steps_per_epoch: int

    def __init__(self, settings: Settings, weights: dict[str, Tensor], weight_decay: float) -> None:
        self.weights, self._settings = weights, settings
        self.optimizer = torch.optim.AdamW(weights.values(), settings.lr, BETAS, weight_decay=weight_decay)
        self.step_number = 0

    @property
    def num_steps(self) -> int:
        return self._settings.epochs * self.steps_per_epoch

    @abstractmethod
    def backward(self, items: Tensor, generator: torch.Generator) -> float:
        """Add the gradient of the loss over `items` [n] int64 to the weights; returns the loss.

        `generator` is for further draws that all steps of an epoch share.
        """

    @abstractmethod
    def evaluate(self, training_loss: float) -> dict[str, Any]:
        """The figures of an epoch for the history, from texts held out and the mean loss of its steps."""

    def step(self) -> float:
        """One step on the next batch; returns its loss."""
        epoch, number = divmod(self.step_number, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self._settings.seed * 1000 + epoch)
        order = torch.randperm(self.num_items, generator=generator)
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.lr * self._schedule()
        self.optimizer.zero_grad()
        loss = self.backward(order[number * self.items_per_step :][: self.items_per_step], generator)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), MAX_NORM)
        self.optimizer.step()
        self.step_number += 1
        return loss

    def _schedule(self) -> float:
        """Linear warmup, then half a cosine."""
        warmup = max(int(WARMUP * self.num_steps), 1)
        if self.step_number < warmup:
            return (self.step_number + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (self.step_number - warmup) / max(self.num_steps - warmup, 1))

    def train(self, checkpoint: Path) -> list[dict[str, Any]]:
        """Train to the end, from the checkpoint if it is there; returns the figures of each epoch."""
        history, losses = self._restore(checkpoint) if checkpoint.is_file() else ([], [])
        done, saved = self.step_number, time.monotonic()
        with tqdm(total=self.num_steps, initial=done, unit="step", desc="training", disable=None) as bar:
            while self.step_number < self.num_steps:
                losses.append(self.step())
                bar.update()
                epoch, rest = divmod(self.step_number, self.steps_per_epoch)
                if rest == 0:
                    mean = round(sum(losses) / len(losses), 4)
                    history.append({"epoch": epoch, **self.evaluate(mean)})
                    losses.clear()
                    tqdm.write(json.dumps(history[-1]))
                if rest == 0 or time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save(checkpoint, history, losses)
                    saved = time.monotonic()
        return history

    def _save(self, checkpoint: Path, history: list[dict[str, Any]], losses: list[float]) -> None:
        state = {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step_number,
            "history": history,
            "losses": losses,  # of the epoch so far
        }
        with whole_file(checkpoint) as temporary:
            torch.save(state, temporary)

    @torch.no_grad()
    def _restore(self, checkpoint: Path) -> tuple[list[dict[str, Any]], list[float]]:
        try:
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # of several kinds
            raise TrainError(f"{checkpoint} is damaged; delete it to begin the training anew.") from error
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])  # to the device of the weights
        self.step_number = state["step"]
        return state["history"], state["losses"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, which gets its name when all of it is on the disk. OSError if that fails, also where a
    library has another name for it; nothing is left then."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        temporary.chmod(0o644)  # safetensors writes files that others may not read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        raise
    except Exception as error:  # of torch.save and safetensors: RuntimeError, SafetensorError
        reason = shown(str(error).strip().split("\n")[0])
        raise OSError(f"{path} could not be written ({reason}); make room and try again.") from error
    finally:
        temporary.unlink(missing_ok=True)
