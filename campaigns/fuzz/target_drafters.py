"""Fuzz folders of DFlash and EAGLE-3 drafters: they must draft for the target or give an error message."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from nanospec.config import SpecConfig
from nanospec.drafters import Drafter, Target
from nanospec.drafters.methods import METHODS
from nanospec.kernels import launch
from nanospec.models.decoder import Model
from tests.drive import Job, greedy, make_engine, run
from tests.random_weights import write_drafter
from tests.tiny import tiny_model

from .refusal import answer
from .target_weights import files_of, folder_of, mutate

__all__ = ["INSTRUMENTED", "SEEDS", "mutate", "one"]
INSTRUMENTED = ("nanospec.models", "nanospec.drafters")


@functools.cache
def model() -> Model:
    heads: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    return tiny_model(vocab_size=16, hidden_size=8, intermediate_size=8, **heads)


def seed(method: str, **options: Any) -> bytes:
    with tempfile.TemporaryDirectory() as path:
        folder = write_drafter(Path(path), method, model().config, **options)
        return folder_of({file.name: file.read_bytes() for file in folder.iterdir()})


SEEDS = [
    seed("dflash", num_layers=2, vocab=12),
    seed("dflash", own_head=True, attention_bias=True),
    seed("eagle3", vocab=12, own_head=True, norm_before_residual=True),
    seed("eagle3", model_type="qwen3"),
]


def load(folder: Path, method: str) -> Drafter:
    return METHODS[method].load(SpecConfig(method, str(folder), tree_width=2), Target(model()))


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path, launch.forced("naive"):
        for name, content in files_of(data).items():
            if name and len(os.fsencode(name)) < 256:
                (Path(path) / name).write_bytes(content)
        for method in ("dflash", "eagle3"):
            drafter = answer(load, Path(path), method)
            if drafter is not None:
                run(make_engine(model(), 3, drafter=drafter), [Job([1, 2, 3], greedy(4))])
