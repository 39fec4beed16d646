"""Read the metadata and the list of tensors of a GGUF file.

The format is specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the gguf
library is not used because it takes many seconds and 400 MB for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ....text import reason, shown

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
}
# Types of metadata, as codes of `struct`, and of tensors, by their numbers in the file.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K"}
TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 39: "MXFP4"}
# A row of a tensor is a sequence of blocks with this number of elements and bytes.
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22)}
BLOCKS |= {"Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}


class GGUFError(ValueError):
    """Raised for a file that is corrupt or not supported; the message gives the reason."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise GGUFError with the path for errors in the file's content."""
    try:
        yield
    except (OSError, MemoryError, ImportError):
        raise
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None
    except Exception as error:  # a truncated file, or fields of wrong types or with inconsistent values
        problem = f"{path} cannot be read ({type(error).__name__}: {reason(error)})"
        raise GGUFError(f"{problem}: not a GGUF file, or corrupt; download it again.") from error


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


class GGUFFile(dict[str, Any]):
    """The metadata of a GGUF file by key, and its `tensors` by Hugging Face name. A missing key raises
    GGUFError; corrupt content raises exceptions of any type, see `naming`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise GGUFError("file not found; specify the path of a GGUF file.")
        self.path = path
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if cursor.take(4) != b"GGUF" or cursor.number("I") not in (2, 3):
                raise ValueError("it has no header of version 2 or 3")
            num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
            super().__init__((cursor.text(), cursor.value(cursor.number("I"))) for _ in range(num_fields))
            self.architecture: str = self["general.architecture"]
            if self.architecture not in ARCHITECTURES:
                problem = f"architecture {shown(self.architecture)} is not supported"
                raise GGUFError(f"{problem}; use {' or '.join(ARCHITECTURES)}.")
            tensors = [cursor.tensor() for _ in range(num_tensors)]
            alignment = self.get("general.alignment", 32)
            begin = -(-cursor.at // alignment) * alignment
            self.tensors = {hf_name(t.name): _checked(t, begin, len(data)) for t in tensors}
        if len(self.tensors) < num_tensors:
            raise ValueError("several tensors have the same name")

    def __missing__(self, key: str) -> NoReturn:
        raise GGUFError(f"the required field {key!r} is missing.")

    def hparam(self, key: str, default: Any = None) -> Any:
        """Return the field `ARCHITECTURE.key`, or `default`. Without a default, it must be present."""
        key = f"{self.architecture}.{key}"
        value = self[key] if default is None else self.get(key, default)
        # Rounds a float32 to the short decimal it was written as: 9.99999974e-06 to 1e-05.
        return float(f"{value:.6g}") if isinstance(value, float) else value


class _Cursor:
    """Reads consecutive values. Raises ValueError at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("unexpected end of file")
        return self.data[self.at - size : self.at]

    def numbers(self, code: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Return a value of metadata, whose type is `kind`."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS:
            return self.numbers(SCALARS[kind], count)
        return [self.value(kind) for _ in range(count)]

    def tensor(self) -> StoredTensor:
        name, dims = self.text(), self.numbers("Q", self.number("I"))
        kind, offset = self.number("I"), self.number("Q")
        return StoredTensor(name, TYPES.get(kind, f"type {kind}"), tuple(reversed(dims)), offset)


def _checked(tensor: StoredTensor, begin: int, file_size: int) -> StoredTensor:
    """Return a tensor whose offset was relative to `begin`. Raises ValueError if its shape does not fit its
    type or the file."""
    elements, size = BLOCKS.get(tensor.type, (1, 0))
    if tensor.shape[-1] % elements or (elements > 1 and len(tensor.shape) != 2):
        problem = f"tensor {shown(tensor.name)} has the shape {shown(list(tensor.shape))}"
        raise GGUFError(f"{problem}, but {tensor.type} needs rows of a multiple of {elements} columns.")
    offset = begin + tensor.offset
    if offset + math.prod(tensor.shape) // elements * size > file_size:
        raise ValueError("unexpected end of file")
    return tensor._replace(offset=offset)


def hf_name(name: str) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        kind = "RoPE scaling tensor" if name == "rope_freqs.weight" else "tensor"
        raise GGUFError(f"{kind} {shown(name)} is not supported.")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"
