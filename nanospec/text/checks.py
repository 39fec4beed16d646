"""What settings are refused for, each with one sentence, and how texts are read as numbers.

Limits stand beside the fields that they are for (`config.py`), by `limited`.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from dataclasses import field, fields
from typing import Any

from ..kernels.codes import RULES

MAX_INT64 = 2**63 - 1


def shown(value: object, most: int = 100) -> str:
    """A value as messages quote it: its `repr`, at most so many characters of it, whatever it is."""
    if isinstance(value, str | bytes):
        value = value[:most]  # not all of 100 MB, to be cut after
    try:
        text = repr(value)
    except Exception:  # nested too deeply, an integer of too many digits, somebody's own class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."


def limited(default: Any, low: float, high: float = math.inf, **more: Any) -> Any:
    """A number in a dataclass of settings: its default, its smallest and its largest value; `more` is for
    the command line (`cli/options.py`)."""
    return field(default=default, metadata={"limits": (low, high), **more})


def check_number(name: str, value: object, low: float, high: float = math.inf, kind: type = int) -> Any:
    """`value`, of whatever library, as Python's own number. Raises ValueError unless it is an int of 64 bits
    (kind float: any real number) from low to high."""
    number: Any = as_number(value)
    kinds = (int,) if kind is int else (int, float)
    is_number = isinstance(number, kinds) and not isinstance(number, bool)
    most = min(high, MAX_INT64) if kind is int else high
    if is_number and low <= number <= most:
        return number
    what = "an integer" if kind is int else "a number"
    too_large = is_number and number > most
    limits = f"from {low} to {most}" if high < math.inf or too_large else f"of at least {low}"
    raise ValueError(f"{name}={shown(value)} must be {what} {limits}.")


def check_fields(settings: Any) -> None:
    """Raise ValueError unless all flags, numbers and texts of a dataclass are what they are declared to be,
    and within their limits. None and "auto" may stand where the declaration names them. Numbers become
    Python's own."""
    for declared in fields(settings):
        name, value, kind = declared.name, getattr(settings, declared.name), str(declared.type)
        if (value is None and "None" in kind) or (isinstance(value, str) and value == "auto" in kind):
            continue
        if "bool" in kind and not isinstance(value, bool):  # the text "no", say, would count as true
            raise ValueError(f"{name}={shown(value)} must be True or False.")
        if kind in ("str", "str | None") and not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} must be a text.")
        if "limits" in declared.metadata:
            low, high = declared.metadata["limits"]
            number = check_number(name, value, low, high, float if "float" in kind else int)
            object.__setattr__(settings, name, number)  # of a frozen class, too
        if name == "acceptance" and value not in RULES:
            raise ValueError(f"acceptance={shown(value)} is unknown; use one of {', '.join(RULES)}.")


def as_bytes(value: Any, name: str = "kv_cache_memory") -> Any:
    """A number of bytes of a text such as "400M", "4g" or "1.5GiB" (powers of 1024), or "4GB" (of 1000).
    What is no text stays as it is, for the checks to refuse. `name` is what messages call it."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(IB|B|)", value.strip().upper())
    if match is None:
        raise ValueError(f"{name}={shown(value)} is no number of bytes; write it as '400M' or '4G'.")
    number, unit, suffix = match.groups()
    return int(float(number) * (1000 if unit and suffix == "B" else 1024) ** " KMGT".index(unit or " "))


def as_number(value: Any) -> Any:
    """A number of any library, numpy's say, as Python's own; anything else as it is, for the checks to
    refuse."""
    if isinstance(value, int | float):  # bool is one, and stays what it is
        return value
    try:
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:  # a fraction of large numbers
        return value


def as_token_id(value: object) -> object:
    """Any kind of integer, numpy's too, as an int; anything else as it is, for the checks to refuse. True
    and False are no token ids."""
    try:
        return value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value
