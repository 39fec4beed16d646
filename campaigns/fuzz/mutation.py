"""Mutations of inputs: of bytes, of JSON that mostly remains valid, and of folders.

A folder is encoded as a sequence of files: the length of the name in one byte, the name, the length of the
content in four bytes, and the content.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

LONGEST = 1 << 16  # maximum number of bytes
UNUSUAL_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 10**40, -(2**63),
    0.0, -0.0, 0.5, 1e-45, 1e308, math.inf, -math.inf, math.nan,
    "", "0", "a", "..", "../a", "/etc/passwd", "\0", "\n", "\ud800", "é😀", "x" * 1000, "{{", "%s",
    [], {}, [[]], [{}], [None], {"a": 1}, {"": ""}, [1.5], [-1], [2**63], ["a"], [True], list(range(200)),
]  # fmt: skip
PIECES = [*(bytes([byte]) for byte in b'\0\xff"{}[],:-'), b"\xff\xfe", b"NaN", b"1e999", b"\\ud800"]


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Change, remove, repeat or insert a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0:
                del changed[at : at + length]
            case 1:
                changed[at:at] = rng.randbytes(length)
            case 2:
                changed[at : at + length] = rng.randbytes(len(changed[at : at + length]))
            case 3:
                changed[at:at] = changed[at : at + length] * rng.choice((1, 2, 50))
            case 4:
                changed[at : at + rng.choice((0, 1))] = rng.choice(PIECES)
            case 5:  # an integer, as used for lengths and offsets in binary formats
                number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(300)))
                changed[at : at + 8] = number.to_bytes(8, "little")
    return bytes(changed[:LONGEST])


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Replace, remove, repeat, rename or nest values of JSON; sometimes mutate bytes instead."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    if rng.random() < 0.1:
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder = [content]
        inner, key = rng.choice(list(_places(holder)))
        _change(inner, key, rng)
        content = holder[0] if holder else None
    text = json.dumps(content)
    if rng.random() < 0.05 and text.startswith("{") and len(text) > 2:  # duplicate key
        text = "{" + rng.choice(('"a": 1, ', text[1:-1] + ", ")) + text[1:]
    return text.encode()[:LONGEST]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or index) of every value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _change(inner: Any, key: Any, rng: Random) -> None:
    unusual, value = deepcopy(rng.choice(UNUSUAL_VALUES)), inner[key]
    match rng.randrange(6):
        case 0 | 1:
            inner[key] = unusual
        case 2 if isinstance(inner, dict):
            inner[rng.choice(("", "a", key + "x", "../" + key))] = inner.pop(key)
        case 2 | 3:
            del inner[key]
        case 4:
            inner[key] = rng.choice(([value], {"a": value}, [value, unusual]))
        case 5 if isinstance(value, int | float) and abs(value) < 2**64:
            inner[key] = rng.choice((value + 1, value - 1, -value, value * 2**31, value / 3))
        case 5:
            inner[key] = str(value) * rng.choice((1, 2, 100))


def folder_of(files: dict[str, bytes]) -> bytes:
    """Encode files, without those with names that are too long."""
    named = ((name.encode(), content) for name, content in files.items())
    return b"".join(
        bytes([len(name)]) + name + struct.pack("<I", len(content)) + content
        for name, content in named
        if len(name) < 256
    )


def files_of(data: bytes) -> dict[str, bytes]:
    """Decode files, as far as possible. Skips names that are not plain file names."""
    files: dict[str, bytes] = {}
    while data and len(files) < 8:
        name, data = data[1 : 1 + data[0]], data[1 + data[0] :]
        size = int.from_bytes(data[:4], "little")
        content, data = data[4 : 4 + size], data[4 + size :]
        text = name.decode(errors="replace")
        if text and Path(text).name == text and "\0" not in text and len(text.encode()) < 256:
            files[text] = content
    return files


def mutate_files(data: bytes, rng: Random) -> bytes:
    """Mutate a file of a folder by its type: JSON, safetensors, or bytes. Sometimes cut or rename a file."""
    files = files_of(data)
    if not files or rng.random() < 0.05:
        return mutate_bytes(data, rng)
    name = rng.choice(list(files))
    content, how = files[name], rng.random()
    if how < 0.05:
        files[name] = content[: rng.randrange(len(content) + 1)]
    elif how < 0.1:
        files[rng.choice(("model.safetensors", "c.safetensors", "config.json", "x.bin"))] = files.pop(name)
    elif name.endswith(".json"):
        files[name] = mutate_json(content, rng)
    elif name.endswith(".safetensors"):
        files[name] = _mutate_safetensors(content, rng)
    else:
        files[name] = mutate_bytes(content, rng)
    return folder_of(files)


def with_header(header: bytes, body: bytes) -> bytes:
    """Return a safetensors file."""
    return struct.pack("<Q", len(header)) + header + body


def _mutate_safetensors(content: bytes, rng: Random) -> bytes:
    """Mutate the header, sometimes its length or the body."""
    end = 8 + int.from_bytes(content[:8], "little")
    header, body = mutate_json(content[8:end], rng), content[end:]
    if rng.random() < 0.1:
        wrong = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, max(0, len(header) - 1), len(header) + 1))
        return struct.pack("<Q", wrong) + header + body
    return with_header(header, body if rng.random() < 0.8 else mutate_bytes(body, rng))
