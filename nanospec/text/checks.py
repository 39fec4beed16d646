"""Checks of settings, each with one sentence for a bad value, and numbers written as text.

A limit stands beside the field that it is for (`config.py`), declared by `limited`.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from dataclasses import field, fields
from typing import Any

MAX_INT64 = 2**63 - 1


def shown(value: object, most: int = 100) -> str:
    """Return the `repr` of a value as messages quote it, cut to `most` characters."""
    if isinstance(value, str | bytes):
        value = value[:most]
    try:
        text = repr(value)
    except Exception:  # nested too deeply, an integer of too many digits, a class of the user
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."


def limited(default: Any, low: float, high: float = math.inf, **more: Any) -> Any:
    """Declare a number in a dataclass of settings with its limits; `more` is for `apps/cli/options.py`."""
    return field(default=default, metadata={"limits": (low, high), **more})


def check_number(name: str, value: object, low: float, high: float = math.inf, kind: type = int) -> Any:
    """Return `value`, of any numeric type, as a Python number. Raises ValueError unless it is an integer of
    64 bits (kind float: a real number) from `low` to `high`."""
    number: Any = as_number(value)
    is_number = isinstance(number, int if kind is int else int | float) and not isinstance(number, bool)
    most = min(high, MAX_INT64) if kind is int else high
    if is_number and low <= number <= most:
        return number
    what = "an integer" if kind is int else "a number"
    has_end = high < math.inf or (is_number and number > most)
    limits = f"from {low} to {most}" if has_end else f"of at least {low}"
    raise ValueError(f"{name}={shown(value)} must be {what} {limits}.")


def check_fields(settings: Any) -> None:
    """Check the flags, numbers and texts of a dataclass against their declared types and limits; None and
    "auto" may stand where the type names them. Replaces numbers by Python's own."""
    for declared in fields(settings):
        name, value, kind = declared.name, getattr(settings, declared.name), str(declared.type)
        if (value is None and "None" in kind) or (isinstance(value, str) and value == "auto" in kind):
            continue
        if "bool" in kind and not isinstance(value, bool):  # the text "no" would count as true
            raise ValueError(f"{name}={shown(value)} must be True or False.")
        if kind in ("str", "str | None") and not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} must be a text.")
        if "limits" in declared.metadata:
            low, high = declared.metadata["limits"]
            number = check_number(name, value, low, high, float if "float" in kind else int)
            object.__setattr__(settings, name, number)  # frozen


def as_bytes(value: Any, name: str = "kv_cache_memory") -> Any:
    """Return the number of bytes that a text such as "400M", "4g" or "1.5GiB" (powers of 1024) or "4GB" (of
    1000) stands for; other types unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(IB|B|)", value.strip().upper())
    if match is None:
        raise ValueError(f"{name}={shown(value)} is no number of bytes; write it as '400M' or '4G'.")
    number, unit, suffix = match.groups()
    return int(float(number) * (1000 if unit and suffix == "B" else 1024) ** " KMGT".index(unit or " "))


def as_number(value: Any) -> Any:
    """Return a number of any library, such as numpy, as Python's own; other types unchanged."""
    if isinstance(value, bool | int | float):
        return value
    try:
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:  # a fraction of large numbers
        return value


def as_token_id(value: object) -> object:
    """Return an integer of any library as an int; other types and booleans unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value
