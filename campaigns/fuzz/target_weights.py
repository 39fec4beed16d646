"""Fuzz safetensors files, also sharded: loading must give their exact contents or an error message.

An input is a sequence of files: the length of the name in one byte, the name, the length of the content in
four bytes, and the content.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from nanospec.models import weights
from nanospec.models.config import ModelConfig
from nanospec.models.families import config_of
from nanospec.models.formats.safetensors import weight_files

from .mutation import mutate_bytes, mutate_json
from .refusal import answer
from .target_config import SMALL

CONFIG = {**SMALL, "architectures": ["LlamaForCausalLM"], "mlp_bias": False, "num_hidden_layers": 1}
SHAPES = config_of(CONFIG).parameter_shapes()
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def stored(names: list[str], dtype: str = "BF16") -> bytes:
    """Return a safetensors file with tensors of the model, filled with ones."""
    header, body = {}, b""
    for name in names:
        item = {"BF16": b"\x80\x3f", "F32": b"\0\0\x80\x3f"}[dtype]
        begin, body = len(body), body + item * math.prod(SHAPES[name])
        offsets = [begin, len(body)]
        header[name] = {"dtype": dtype, "shape": list(SHAPES[name]), "data_offsets": offsets}
    return with_header(json.dumps(header).encode(), body)


def with_header(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def folder_of(files: dict[str, bytes]) -> bytes:
    return b"".join(
        bytes([len(name.encode())]) + name.encode() + struct.pack("<I", len(content)) + content
        for name, content in files.items()
    )


def files_of(data: bytes) -> dict[str, bytes]:
    """Parse an input into files, as far as possible. Skips names that are not plain file names."""
    files: dict[str, bytes] = {}
    while data and len(files) < 8:
        name, data = data[1 : 1 + data[0]], data[1 + data[0] :]
        size = int.from_bytes(data[:4], "little")
        content, data = data[4 : 4 + size], data[4 + size :]
        text = name.decode(errors="replace")
        if Path(text).name == text and "\0" not in text:
            files[text] = content
    return files


NAMES = list(SHAPES)
HALVES = {"a.safetensors": NAMES[:5], "b.safetensors": NAMES[5:]}
MAP = {"weight_map": {name: file for file, names in HALVES.items() for name in names}}
SEEDS = [
    folder_of({SINGLE: stored(NAMES)}),
    folder_of({"other.safetensors": stored(NAMES, "F32")[: 1 << 15]}),
    folder_of({**{file: stored(names) for file, names in HALVES.items()}, INDEX: json.dumps(MAP).encode()}),
]


def mutate(data: bytes, rng: Random) -> bytes:
    """Mutate one file: its JSON, its header, the length of the header, or its name."""
    files = files_of(data)
    if not files or rng.random() < 0.1:
        return mutate_bytes(data, rng)
    name = rng.choice(list(files))
    content = files[name]
    if name.endswith(".json"):
        files[name] = mutate_json(content, rng)
    elif rng.random() < 0.8:
        end = 8 + int.from_bytes(content[:8], "little")
        header, body = mutate_json(content[8:end], rng), content[end:]
        files[name] = with_header(header, body if rng.random() < 0.8 else mutate_bytes(body, rng))
        if rng.random() < 0.1:
            wrong = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, max(0, len(header) - 1), len(header) + 1))
            files[name] = struct.pack("<Q", wrong) + files[name][8:]
    elif rng.random() < 0.5:
        files[name] = content[: rng.randrange(len(content) + 1)]
    else:
        files[rng.choice((SINGLE, "c.safetensors", INDEX, "x.bin"))] = files.pop(name)
    return folder_of({name: content for name, content in files.items() if len(name.encode()) < 256})


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name, content in files_of(data).items():
            if name and name != "config.json" and len(os.fsencode(name)) < 256:
                (folder / name).write_bytes(content)
        model = answer(load, folder)
        if model is not None:
            assert_equal(model, folder)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the loader passes to the model."""
    tensors: dict[str, torch.Tensor] = {}

    def model(config: ModelConfig, dtype: torch.dtype, device: str, get: Any) -> dict[str, torch.Tensor]:
        tensors.update((name, get(name)) for name in config.parameter_shapes())
        return tensors

    with patch.object(weights, "Model", model):
        weights.load_model(folder, torch.float32, "cpu")
    return tensors


def assert_equal(model: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare the loaded tensors with those of a minimal reader."""
    read: dict[str, np.ndarray[Any, Any]] = {}
    for file in weight_files(folder):
        assert file.parent == folder
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:end]).items():
            if name != "__metadata__":
                first, last = (end + offset for offset in entry["data_offsets"])
                read[name] = numbers(content[first:last], entry["dtype"]).reshape(entry["shape"])
    for name, tensor in model.items():
        assert np.array_equal(tensor.numpy(), read[name], equal_nan=True), name


def numbers(content: bytes, dtype: str) -> np.ndarray[Any, Any]:
    values = np.frombuffer(content, {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype])
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
