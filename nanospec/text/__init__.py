"""User input. This module validates settings and reads files; errors are exceptions with a message of one
sentence. `chat.py` handles prompts and conversations, `tokenizer.py` tokenizes and detokenizes text.
"""

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
MAX_FILE = 256 << 20  # maximum bytes of a model's text file; those of large vocabularies have about 40 MB


def shown(value: object, most: int = 100) -> str:
    """Return `repr(value)` for use in an error message, truncated to `most` characters. Never raises."""
    if isinstance(value, str | bytes):
        value = value[:most]
    try:
        text = repr(value)
    except Exception:  # nested too deeply, an integer with too many digits, or a broken __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."


def bounded_field(default: Any, low: float, high: float = math.inf, **more: Any) -> Any:
    """Declare a dataclass field with limits for `check_fields`; `more` is metadata for `apps/options.py`."""
    return field(default=default, metadata={"limits": (low, high), **more})


def check_number(
    name: str, value: object, low: float, high: float = math.inf, kind: type = int, other: str = ""
) -> Any:
    """Return `value`, of any numeric type, as a Python int (or float, if `kind` is float). Raises ValueError
    unless it is in [low, high]; ints must also fit 64 bits. The message mentions the `other` valid values."""
    number = as_int(value)
    if kind is float and not isinstance(number, int) and isinstance(number, numbers.Real):
        with suppress(OverflowError):  # a fraction of large numbers
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
    """Check the bool, number and str fields of a dataclass against their types and limits; None and "auto"
    are valid if the type includes them. Converts numbers to int or float. Raises ValueError."""
    for declared in fields(settings):
        name, value, kind = declared.name, getattr(settings, declared.name), str(declared.type)
        if (value is None and "None" in kind) or (isinstance(value, str) and value == "auto" in kind):
            continue
        if "bool" in kind and not isinstance(value, bool):  # the string "no" would be true
            raise ValueError(f"{name}={shown(value)} must be True or False.")
        if kind in ("str", "str | None") and not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} must be a string.")
        if "limits" in declared.metadata:
            low, high = declared.metadata["limits"]
            other = "'auto' or " if "auto" in kind else ""
            number = check_number(name, value, low, high, float if "float" in kind else int, other)
            object.__setattr__(settings, name, number)  # the dataclass is frozen


def parse_size(value: Any, name: str = "kv_cache_memory") -> Any:
    """Convert a size such as "400M", "4g" or "1.5GiB" (powers of 1024) or "4GB" (powers of 1000) to bytes.
    Values of other types are returned unchanged. Raises ValueError for other strings."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(IB|B|)", value.strip().upper())
    if match is None:
        raise ValueError(f"{name}={shown(value)} must be a number of bytes, such as '400M' or '4G'.")
    number, unit, suffix = match.groups()
    return int(float(number) * (1000 if unit and suffix == "B" else 1024) ** " KMGT".index(unit or " "))


def as_int(value: Any) -> Any:
    """Convert an integer of any type, such as numpy.int64, to int. Other values and bools are unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def reason(error: BaseException | str, most: int = 200) -> str:
    """Return the message of another library's exception as one line of at most `most` characters, with words
    of at most 100; the name of its type if the message is empty."""
    try:
        words = str(error)[: 4 * most].rstrip(".: \n").split()
    except Exception:  # a broken __str__
        words = []
    text = " ".join(word if len(word) <= 100 else word[:97] + "..." for word in words)
    return (text if len(text) <= most else text[: most - 3] + "...") or type(error).__name__


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises ValueError if it is too large or not UTF-8."""
    check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 at byte {error.start}; download it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # malformed, or nested too deeply
        raise ValueError(f"{path} is not valid JSON ({reason(error)}); download it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, not a {type(content).__name__}.")
    return content


def check_size(path: Path) -> None:
    """Raise ValueError if a file is larger than MAX_FILE."""
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path} is larger than {MAX_FILE >> 20} MiB, the limit for files of its kind.")
