"""Fuzz GGUF files: they must give a readable checkpoint or an error message."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

from nanospec.models.families import read_config
from nanospec.models.formats.gguf import convert
from nanospec.models.formats.safetensors import weight_files
from nanospec.text.tokenizer import Tokenizer
from tests.gguf_file import write_gguf

from .mutation import mutate_bytes
from .refusal import answer

INSTRUMENTED = ("nanospec.models",)
HEAD = 6000  # bytes of the fields and tensor shapes, which precede the tensor data


def stored(architecture: str, kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as path:
        write_gguf(Path(path) / "m.gguf", architecture, kind=kind)
        return (Path(path) / "m.gguf").read_bytes()


SEEDS = [stored("llama", "Q8_0"), stored("qwen2", "Q4_K")]


def mutate(data: bytes, rng: Random) -> bytes:
    """Mostly overwrite integers in the head, without moving other data."""
    if rng.random() < 0.2:
        return mutate_bytes(data[:HEAD], rng) + data[HEAD:]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(HEAD, len(changed)) + 1)
        width = rng.choice((1, 4, 8))
        number = rng.choice((0, 1, 2, 8, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, rng.randrange(256)))
        changed[at : at + width] = number.to_bytes(8, "little")[:width]
    return bytes(changed)


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path:
        source, folder = Path(path) / "m.gguf", Path(path) / "model"
        source.write_bytes(data)
        answer(convert, source, folder, "bfloat16")
        written = weight_files(folder) if (folder / "model.safetensors").is_file() else []
        if written:
            answer(read_config, folder)
            answer(Tokenizer, folder)
