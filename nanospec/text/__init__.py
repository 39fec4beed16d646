"""Input from users. This module checks settings and files; a bad value raises an exception whose message
is one sentence. `chat.py` has prompts and conversations, `tokenizer.py` their tokens.

The limit of a setting stands beside its field (`config.py`), declared by `limited`.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
import re
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from typing import Any

MAX_INT64 = 2**63 - 1
MAX_FILE = 256 << 20  # bytes of a text file of a model; large vocabularies take some 40 MB


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
    """Declare a number in a dataclass of settings with its limits; `more` is for `apps/options.py`."""
    return field(default=default, metadata={"limits": (low, high), **more})


def check_number(
    name: str, value: object, low: float, high: float = math.inf, kind: type = int, other: str = ""
) -> Any:
    """Return `value`, of any numeric type, as a Python number. Raises ValueError, whose message names the
    `other` values, unless it is an integer of 64 bits (kind float: a real number) from `low` to `high`."""
    number = as_int(value)
    if kind is float and not isinstance(number, int) and isinstance(number, numbers.Real):
        with suppress(OverflowError):  # of a fraction of large numbers
            number = float(number)
    is_number = isinstance(number, int | kind) and not isinstance(number, bool)
    most = min(high, MAX_INT64) if kind is int else high
    if is_number and low <= number <= most:
        return number
    what = "an integer" if kind is int else "a number"
    has_end = high < math.inf or (is_number and number > most)
    limits = f"from {low} to {most}" if has_end else f"of at least {low}"
    raise ValueError(f"{name}={shown(value)} must be {other}{what} {limits}.")


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
            other = "'auto' or " if "auto" in kind else ""
            number = check_number(name, value, low, high, float if "float" in kind else int, other)
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


def as_int(value: Any) -> Any:
    """Return an integer of any library as an int; other types and booleans unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def reason(error: BaseException | str, most: int = 200) -> str:
    """Return the text of another library's exception for a message: one line of at most `most` characters,
    and of 100 of each word."""
    try:
        words = str(error)[: 4 * most].rstrip(".: \n").split()
    except Exception:  # of a class with a broken __str__
        words = []
    text = " ".join(word if len(word) <= 100 else word[:97] + "..." for word in words)
    return (text if len(text) <= most else text[: most - 3] + "...") or type(error).__name__


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ValueError if it is too large or not UTF-8."""
    check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, at byte {error.start}; fetch it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # malformed, or nested without end
        raise ValueError(f"{path} is not valid JSON ({reason(error)}); fetch it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def check_size(path: Path) -> None:
    """Raise ValueError if a file is too large to be read at once."""
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path} has more than {MAX_FILE >> 20} MB, too much for a file of its kind.")
