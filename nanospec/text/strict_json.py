"""JSON that somebody sends: what it means beyond doubt, or a sentence.

Python's own reader takes more than JSON is (NaN, a name twice in one object), and gives up in the middle of
what is nested too deeply.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from .checks import shown

MAX_DEPTH = 128  # levels; more than any request has, and fewer than anything here gives up at


def plain(text: bytes | str) -> Any:
    """What a JSON text in UTF-8 says. Raises ValueError, which reads on behind "... is no JSON: "."""
    try:
        decoded = text if isinstance(text, str) else text.decode()
        found = json.loads(decoded, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"{error.msg}, at {where}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8, at byte {error.start}") from None
    except ValueError as error:  # ours, or about a number of thousands of digits
        raise ValueError(str(error).partition("; use sys.")[0]) from None
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH:
        _check_depth(found)
    return found


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(MAX_DEPTH):
        inner = [each for part in level for each in (part.values() if isinstance(part, dict) else part)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(twice)} stands twice in one object")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):  # NaN, Infinity, 1e999
        raise ValueError(f"{shown(text)[1:-1]} is no number that can be")
    return number

