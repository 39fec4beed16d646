"""Parse JSON from users: requests of the server, lines of a batch, texts to train on."""

from __future__ import annotations

import json
import math
from typing import Any

from ..text import shown

MAX_DEPTH = 128  # levels of nesting


def strict_json(text: bytes) -> Any:
    """Parse JSON from a user. Raises ValueError with the reason, also for NaN, infinity, more than MAX_DEPTH
    levels of nesting, and a name that occurs twice in one object."""
    decoded = text.decode("utf-8-sig")  # UnicodeDecodeError is a ValueError
    too_deep = f"it is nested more than {MAX_DEPTH} levels deep"
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
        raise ValueError(f"{shown(max(names, key=names.count))} stands twice in one object")
    return items


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):  # NaN, Infinity, 1e999
        raise ValueError(f"{shown(text)[1:-1]} is not a finite number")
    return number
