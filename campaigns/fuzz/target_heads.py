"""Fuzz Medusa heads: they must fit the model or give an error message."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from nanospec.drafters.medusa import Heads
from nanospec.kernels import launch
from nanospec.models.decoder import Model
from tests.tiny import tiny_model

from .mutation import mutate_bytes, mutate_json
from .refusal import answer
from .target_weights import with_header

INSTRUMENTED = ("nanospec.models", "nanospec.drafters")
H, V = 8, 16
IDS = torch.arange(0, V, 2)
BLOCKS = {f"{i}.0.linear.{part}": torch.ones(H, H)[: H if part == "weight" else 1].squeeze(0)
          for i in range(2) for part in ("weight", "bias")}  # fmt: skip
SEEDS = [
    save(BLOCKS),
    save({f"medusa_head.{name}": block for name, block in BLOCKS.items()} | {"0.1.weight": torch.ones(V, H)}),
    save({**BLOCKS, "token_map": IDS, "1.1.weight": torch.ones(len(IDS), H)}),
    save({"token_map": IDS.int()}),
]


@functools.cache
def model() -> Model:
    heads: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    return tiny_model(vocab_size=V, hidden_size=H, intermediate_size=8, **heads)


def mutate(data: bytes, rng: Random) -> bytes:
    """Mutate the JSON of the header, and sometimes any bytes."""
    if len(data) < 9 or rng.random() < 0.2:
        return mutate_bytes(data, rng)
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutate_json(data[8:end], rng)
    if rng.random() < 0.2:
        digit = rng.choice("0123456789")
        header = header.replace(digit.encode(), rng.choice((b"9" * 20, b"7", b"00")), 1)
    return with_header(header, data[end:])


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path, launch.forced("naive"):
        (Path(path) / "heads.safetensors").write_bytes(data)
        heads = answer(Heads.load, Path(path) / "heads.safetensors", model())
        if heads is not None:
            drafts = heads.tokens(heads.logits(torch.zeros(1, H)).argmax(-1))
            assert drafts.shape == (1, heads.num_heads)
            assert ((drafts >= 0) & (drafts < V)).all()
