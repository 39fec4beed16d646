"""Validate `SamplingParams(response_format=...)`. Does not import llguidance, which compiles it.

    {"type": "text"}                                      any text, the same as None
    {"type": "json_object"}                               any JSON object
    {"type": "json_schema", "json_schema": {"schema": {...}}}    optional: "name", "description", "strict"
    {"type": "regex", "regex": "..."}                     a full match of the regular expression
    {"type": "grammar", "grammar": "..."}                 a grammar in Lark or GBNF format
    {"type": "choice", "choice": ["...", ...]}            one of the strings

The first three are OpenAI's. All values can be represented in JSON.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any

from ...config import SamplingParams
from ...text.validation import shown

TYPES = ("text", "json_object", "json_schema", "regex", "grammar", "choice")
BARE = ("text", "json_object")  # the types that take no other field
FIELDS = ("name", "description", "strict", "schema")  # the fields of "json_schema"
# Fixed separators: models may generate whitespace endlessly, and fixed separators can be drafted.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_BYTES, MAX_DEPTH = 64 << 10, 64
TOO_LARGE = f"response_format must be at most {MAX_DEPTH} levels deep and {MAX_BYTES:,} bytes long as JSON."
MAX_PATTERNS = 12  # patterns that a schema may combine; each doubles the memory to compile: 8 GB for 30
LOWEST = -9 * 10**18  # the lower limit of numbers in a schema
BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|[][{}]')  # also matches strings, to skip the brackets in them


def validate(fmt: Any) -> dict[str, Any] | None:
    """Return a validated copy of a `response_format`, None for any text. Raises ValueError if malformed."""
    fmt = _plain(fmt)  # first, because the error messages below print it
    if fmt is None:
        return None
    if not isinstance(fmt, dict) or fmt.get("type") not in TYPES:
        types = ", ".join(map(repr, TYPES))
        raise ValueError(f"response_format={shown(fmt)} must be an object whose 'type' is one of {types}.")
    kind = fmt["type"]
    fields = {name: value for name, value in fmt.items() if value is not None or name == kind}
    if fields.keys() != ({"type"} if kind in BARE else {"type", kind}):
        needs = "only the field 'type'" if kind in BARE else f"exactly the fields 'type' and {kind!r}"
        raise ValueError(f"response_format={shown(fmt)} must have {needs}.")
    value: Any = fields.get(kind)
    if kind == "json_schema":
        _check_schema(value)
    elif kind in ("regex", "grammar") and (not isinstance(value, str) or not value.strip()):
        raise ValueError(f"response_format: {kind!r} must be a non-empty string.")
    elif kind == "choice" and not (
        isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
    ):
        raise ValueError("response_format: 'choice' must be a non-empty list of non-empty strings.")
    elif kind == "grammar":
        _check_parts(_schemas_in(value))
    return None if kind == "text" else fields


def check_conflicts(params: SamplingParams) -> None:
    """Raise ValueError for parameters that conflict with a grammar."""
    for name, is_set, why in (
        ("ignore_eos", params.ignore_eos, "the output ends where the grammar ends"),
        ("min_tokens", params.min_tokens > 0, "the output ends where the grammar ends"),
        ("acceptance", params.acceptance not in (None, "exact"), "grammars require acceptance='exact'"),
    ):
        if is_set:
            value = getattr(params, name)
            raise ValueError(f"{name}={shown(value)} conflicts with response_format: {why}; remove one.")


def _check_schema(json_schema: Any) -> None:
    """Validate OpenAI's `json_schema`. "strict" has no effect: the output always matches the schema."""
    if not isinstance(json_schema, dict) or not isinstance(json_schema.get("schema"), dict):
        raise ValueError("response_format: 'json_schema' must be an object with the object 'schema'.")
    if unknown := [name for name in json_schema if name not in FIELDS]:
        known = ", ".join(map(repr, FIELDS))
        raise ValueError(f"response_format: unknown field {shown(unknown[0])}; 'json_schema' has {known}.")
    _check_parts([json_schema["schema"]])


def _check_parts(parts: list[Any]) -> None:
    """Raise ValueError for schemas that crash llguidance 1.9.1: a string that must match too many regular
    expressions at once, or a number close to the minimum of int64."""
    patterns, combines = set[str](), False
    while parts:
        part: Any = parts.pop()
        if isinstance(part, dict):
            combines |= "allOf" in part or ("$ref" in part and len(part) > 1)
            patterns |= {each for name in ("pattern", "format") if isinstance(each := part.get(name), str)}
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int | float) and part < LOWEST:
            raise ValueError(f"response_format: schema numbers must be at least {LOWEST}, got {shown(part)}.")
    if combines and len(patterns) > MAX_PATTERNS:
        raise ValueError(
            "response_format: a schema that uses 'allOf', or other keywords next to '$ref', may have at most "
            f"{MAX_PATTERNS} different patterns and formats, got {len(patterns)}."
        )


def _schemas_in(grammar: str) -> list[Any]:
    """Return the JSON schemas embedded in a grammar with `%json`."""
    schemas = []
    for match in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # llguidance reports these
            schemas.append(json.JSONDecoder().raw_decode(grammar, match.end())[0])
    return schemas


def _plain(value: Any) -> Any:
    """Return a copy of JSON data. Raises ValueError for other types, and for data too long or too deep."""
    parts = json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value)
    try:
        text = "".join(islice(parts, MAX_BYTES + 1))  # each part has at least one character
        size = len(text.encode())
    except RecursionError:
        raise ValueError(TOO_LARGE) from None
    except (TypeError, ValueError):  # includes UnicodeEncodeError
        raise ValueError(
            "response_format must be valid JSON: objects, lists, strings, booleans, null and finite numbers."
        ) from None
    levels = accumulate((part in "[{") - (part in "]}") for part in BRACKETS.findall(text))
    if size > MAX_BYTES or max(levels, default=0) > MAX_DEPTH:
        raise ValueError(TOO_LARGE)
    return json.loads(text)
