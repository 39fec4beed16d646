"""Check settings and requests. The limits and choices of a field are declared with it; `check_fields` checks
all of them. An error is one sentence with the value, the limit and the fix; `shown` and `reason` quote values
and other libraries' errors in it.
"""

import math
import numbers
import operator
import re
from contextlib import suppress
from dataclasses import field, fields
from typing import Any

MAX_INT64 = 2**63 - 1


def shown(value: object, most: int = 100) -> str:
    """Return `repr(value)` for use in an error message, truncated to `most` characters. Never raises."""
    if isinstance(value, str | bytes):
        value = value[:most]
    try:
        text = repr(value)
    except Exception:  # nested too deeply, an integer with too many digits, or a broken __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."


def reason(error: BaseException | str, most: int = 200) -> str:
    """Return the message of another library's exception as one line of at most `most` characters, with words
    of at most 100; the name of its type if the message is empty."""
    try:
        words = str(error)[: 4 * most].rstrip(".: \n").split()
    except Exception:  # a broken __str__
        words = []
    text = " ".join(word if len(word) <= 100 else word[:97] + "..." for word in words)
    return (text if len(text) <= most else text[: most - 3] + "...") or type(error).__name__


def bounded_field(default: Any, low: float, high: float = math.inf, **more: Any) -> Any:
    """Declare a dataclass field with limits for `check_fields`. In `more`, `read` converts a string, given it
    and the field's name; `metavar` is for `apps/options.py`."""
    return field(default=default, metadata={"limits": (low, high), **more})


def choice_field(default: Any, *choices: str) -> Any:
    """Declare a dataclass field with the valid strings for `check_fields`."""
    return field(default=default, metadata={"choices": choices})


def check_fields(settings: Any) -> None:
    """Check the bool, number and str fields of a dataclass against their types, limits and choices; None and
    "auto" are valid if the type includes them. Converts numbers to int or float. Raises ValueError."""
    for declared in fields(settings):
        name, value, kind = declared.name, getattr(settings, declared.name), str(declared.type)
        if (value is None and "None" in kind) or (isinstance(value, str) and value == "auto" in kind):
            continue
        if "bool" in kind and not isinstance(value, bool):  # the string "no" would be true
            raise ValueError(f"{name}={shown(value)} must be True or False.")
        if kind in ("str", "str | None") and not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} must be a string.")
        if (choices := declared.metadata.get("choices")) and value not in choices:
            raise ValueError(
                f"{name}={shown(value)} is not supported; use {' or '.join(map(repr, choices))}."
            )
        if isinstance(value, str) and "read" in declared.metadata:
            value = declared.metadata["read"](value, name)
        if "limits" in declared.metadata:
            low, high = declared.metadata["limits"]
            other = "'auto' or " if "auto" in kind else ""
            number = check_number(name, value, low, high, float if "float" in kind else int, other)
            object.__setattr__(settings, name, number)  # the dataclass is frozen


def check_number(
    name: str, value: object, low: float, high: float = math.inf, kind: type = int, other: str = ""
) -> Any:
    """Return `value`, of any numeric type, as a Python int (or float, if `kind` is float). Raises ValueError
    unless it is in [low, high]; ints must also fit 64 bits. The message mentions the `other` valid values."""
    number = as_int(value)
    if kind is float and not isinstance(number, int) and isinstance(number, numbers.Real):
        with suppress(OverflowError):  # a fraction of large numbers
            number = float(number)
    most = min(high, MAX_INT64) if kind is int else high
    is_number = isinstance(number, int | kind) and not isinstance(number, bool)
    if is_number and low <= number <= most:
        return number
    what = "an integer" if kind is int else "a number"
    has_end = high < math.inf or (is_number and number > most)
    limits = f"from {low} to {most}" if has_end else f"of at least {low}"
    raise ValueError(f"{name}={shown(value)} must be {other}{what} {limits}.")


def as_int(value: Any) -> Any:
    """Convert an integer of any type, such as numpy.int64, to int. Other values and bools are unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def parse_size(text: str, name: str = "size") -> int:
    """Convert a size such as "400M", "4g" or "1.5GiB" (powers of 1024) or "4GB" (powers of 1000) to bytes."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(IB|B|)", text.strip().upper())
    if match is None:
        raise ValueError(f"{name}={shown(text)} must be a number of bytes, such as '400M' or '4G'.")
    number, unit, suffix = match.groups()
    return int(float(number) * (1000 if unit and suffix == "B" else 1024) ** " KMGT".index(unit or " "))
