"""Read a GGUF file: its metadata, and its tensors as the weights of a checkpoint.

The format is specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the gguf
library is not used because it takes many seconds and 400 MB for a vocabulary of 150,000 tokens.

For the llama architecture, llama.cpp reorders rows of q and k for interleaved RoPE; `GGUFCheckpoint` restores
the order of Hugging Face.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.layer.quantized import GROUP, Quantized
from ....text.files import errors_of
from ....text.validation import shown
from .. import Shapes
from ..safetensors import check_fit
from .blocks import TYPES

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "rope_freqs": "rope_freqs",
}
# Types of metadata, as codes of `struct`, and of tensors, by their numbers in the file.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TYPE_OF = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"}
TYPE_OF |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}
CHUNK = 1 << 20  # elements that are decoded at a time


class Fields(dict[str, Any]):
    """The metadata of a GGUF file by key."""

    def hparam(self, key: str, default: Any = None) -> Any:
        """Return the field `ARCHITECTURE.key`, or `default`. Without a default, it must be present."""
        key = f"{self['general.architecture']}.{key}"
        value = self[key] if default is None else self.get(key, default)
        # Rounds a float32 to the short decimal it was written as: 9.99999974e-06 to 1e-05.
        return float(f"{value:.6g}") if isinstance(value, float) else value


class StoredTensor(NamedTuple):
    """A tensor in a file. `name` and `type` are those of GGUF, `offset` is its position in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.type


def stamp(path: Path) -> tuple[int, int]:
    """Return the size and modification time of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class GGUFCheckpoint:
    """A checkpoint in a GGUF file, with its `fields`, its `tensors` by Hugging Face name, and `rope_factors`,
    divisors of the frequencies of RoPE, one per pair or none. Raises OSError or ValueError."""

    def __init__(self, path: Path) -> None:
        self.path = path.parent / os.readlink(path) if path.is_symlink() else path  # for messages
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is not a file; specify the path of a GGUF file.")
        with (
            errors_of(self.path),
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            self._read_head(_Cursor(data))

    def _read_head(self, cursor: "_Cursor") -> None:
        if (magic := cursor.take(4, "s")[0]) != b"GGUF" or (version := cursor.number("I")) not in (2, 3):
            found = f"version {version}" if magic == b"GGUF" else f"a file that begins with {magic!r}"
            raise ValueError(f"{found} is not supported; use a little-endian GGUF file of version 2 or 3.")
        num_tensors, num_fields = cursor.take(2, "Q")
        self.fields = Fields((cursor.text(), cursor.value(cursor.number("I"))) for _ in range(num_fields))
        if (count := self.fields.get("split.count", 1)) > 1:
            problem = f"split.count={shown(count)} is not supported"
            raise ValueError(f"{problem}; merge the files with llama-gguf-split --merge.")
        self.architecture = self.fields["general.architecture"]
        if self.architecture not in ARCHITECTURES:
            problem = f"architecture {shown(self.architecture)} is not supported"
            raise ValueError(f"{problem}; use {' or '.join(ARCHITECTURES)}, or safetensors.")
        tensors = [cursor.tensor() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        begin = -(-cursor.at // alignment) * alignment
        self.tensors = {hf_name(t.name): _checked(t, begin, len(cursor.data)) for t in tensors}
        freqs = self.tensors.pop("rope_freqs.weight", None)
        self.rope_factors = [] if freqs is None else self._read(freqs).dequantize().tolist()

    def check(self, shapes: Shapes, is_ignored: Callable[[str], bool]) -> None:
        used = {name: tensor for name, tensor in self.tensors.items() if not is_ignored(name)}
        what = f"The weights in {self.path} do not fit its metadata"
        check_fit(used, shapes, what, dtypes=dict.fromkeys(shapes, tuple(TYPES)))

    def get(self, name: str) -> Tensor | Quantized:
        with errors_of(self.path):
            tensor = self._read(self.tensors[name])
            heads, kind = self.fields.hparam("attention.head_count"), name.split(".")[-2]
            num_heads = {"q_proj": heads, "k_proj": self.fields.hparam("attention.head_count_kv", heads)}
            if self.architecture != "llama" or kind not in num_heads:
                return tensor
            # Within a head, rows (0, 1, 2, 3, ...) of the file are rows (0, D/2, 1, D/2 + 1, ...) here.
            order = torch.arange(tensor.shape[0]).view(num_heads[kind], -1, 2).mT.flatten()
            return tensor.rows(order) if isinstance(tensor, Quantized) else tensor[order]

    def _read(self, tensor: StoredTensor) -> Tensor | Quantized:
        elements, size, decode = TYPES[tensor.type]
        if isinstance(decode, torch.dtype):
            return self._bytes(tensor.offset, math.prod(tensor.shape) * size).view(decode).view(tensor.shape)
        N, K = tensor.shape
        codes, (scale, minimum) = torch.empty(N, K, dtype=torch.uint8), torch.empty(2, N, K // GROUP)
        row = K // elements * size  # bytes
        for first in range(0, N, step := max(1, CHUNK // K)):
            rows = slice(first, first + step)
            raw = self._bytes(tensor.offset + first * row, len(codes[rows]) * row)
            new, new_scale, new_minimum = decode(raw.view(-1, size))
            codes[rows], scale[rows] = new.view(-1, K), new_scale.view(-1, K // GROUP)
            if new_minimum is not None:
                minimum[rows] = new_minimum.view(-1, K // GROUP)
        minima = None if new_minimum is None else minimum
        weight = Quantized(codes, scale, minima, bits=4 if tensor.type.startswith("Q4") else 8)
        if not all(table.isfinite().all() for table in weight.tables) or not scale.any():
            problem = f"the scales of tensor {tensor.name} are NaN, infinite or all 0"
            raise ValueError(f"{problem}; download the file again.")
        return weight

    def _bytes(self, offset: int, size: int) -> Tensor:
        # Not memory-mapped, because resident pages would count as memory of the process.
        return torch.from_numpy(np.fromfile(self.path, np.uint8, size, offset=offset))


class _Cursor:
    """Reads consecutive values."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int, code: str) -> tuple[Any, ...]:
        """Return `count` values of a type of `struct`; for "s", one of `count` bytes."""
        begin, self.at = self.at, self.at + count * struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{count}{code}", self.data, begin)

    def number(self, code: str) -> Any:
        return self.take(1, code)[0]

    def text(self) -> str:
        return str(self.take(self.number("Q"), "s")[0], "utf-8")

    def value(self, kind: int) -> Any:
        """Return a value of metadata, whose type is `kind`."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                return self.take(count, SCALARS[kind])
            return [self.value(kind) for _ in range(count)]
        return self.number(SCALARS[kind])

    def tensor(self) -> StoredTensor:
        name, dims = self.text(), self.take(self.number("I"), "Q")
        kind, offset = self.number("I"), self.number("Q")
        return StoredTensor(name, TYPE_OF.get(kind, str(kind)), tuple(reversed(dims)), offset)


def _checked(tensor: StoredTensor, begin: int, file_size: int) -> StoredTensor:
    """Return a tensor with its offset, which is relative to `begin`, made absolute. Raises ValueError if its
    type is not supported, or the file ends before it."""
    if tensor.type not in TYPES:
        problem = f"tensor {shown(tensor.name)} has the type {tensor.type}, which is not supported"
        raise ValueError(f"{problem}; use a file with types of {', '.join(TYPES)}.")
    elements, size, _ = TYPES[tensor.type]
    offset = begin + tensor.offset
    if (end := offset + math.prod(tensor.shape) // elements * size) > file_size:
        problem = f"tensor {shown(tensor.name)} ends at byte {end} of {file_size}"
        raise ValueError(f"{problem}; the file is truncated, download it again.")
    return tensor._replace(offset=offset)


def hf_name(name: str) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        only = f"only those of {' or '.join(ARCHITECTURES)} are"
        raise ValueError(f"tensor {shown(name)} is not supported; {only}.")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"
