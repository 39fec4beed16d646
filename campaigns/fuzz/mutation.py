"""Mutations of inputs: of bytes, and of JSON that mostly remains valid."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
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
