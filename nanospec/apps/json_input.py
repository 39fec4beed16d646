"""Strict JSON parsing of user input: HTTP bodies, lines of a batch."""

from __future__ import annotations

import json
import math
from typing import Any

from ..text.validation import shown

MAX_DEPTH = 128  # levels of nesting


def strict_json(text: bytes) -> Any:
    """Parse UTF-8 JSON. Raises ValueError for invalid JSON, NaN, infinity, duplicate keys, and more than
    MAX_DEPTH levels of nesting."""
    decoded = text.decode("utf-8-sig")  # UnicodeDecodeError is a ValueError
    too_deep = f"nested more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(decoded, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = (part for part in level if isinstance(part, dict | list))
        level = [each for part in nested for each in (part.values() if isinstance(part, dict) else part)]
    if any(isinstance(part, dict | list) for part in level):
        raise ValueError(too_deep)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {shown(max(names, key=names.count))}")
    return items


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):  # NaN, Infinity, 1e999
        raise ValueError(f"{shown(text)[1:-1]} is not a finite number")
    return number
