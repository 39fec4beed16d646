"""Check `SamplingParams(response_format=...)`, without the library that compiles it.

    {"type": "text"}                                      any text, as None
    {"type": "json_object"}                               a JSON object
    {"type": "json_schema", "json_schema": {"schema": {...}}}    beside it "name", "description", "strict"
    {"type": "regex", "regex": "..."}                     a full match
    {"type": "grammar", "grammar": "..."}                 a text of this grammar, Lark or GBNF
    {"type": "choice", "choice": ["...", ...]}            one of these texts

The first three are OpenAI's. Values are plain data, so that JSON lines carry them.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any

from ...config import SamplingParams
from ...text import shown

TYPES = ("text", "json_object", "json_schema", "regex", "grammar", "choice")
BARE = ("text", "json_object")  # that have no field of their own
FIELDS = ("name", "description", "strict", "schema")  # of a "json_schema"
MAX_BYTES, MAX_DEPTH = 64 << 10, 64  # of a grammar
TOO_LARGE = f"response_format must be at most {MAX_DEPTH} levels deep and {MAX_BYTES:,} bytes long as JSON."
MAX_PATTERNS = 12  # that a schema may combine: each doubles what compiling takes, which is 8 GB for 30
LEAST = -9 * 10**18  # of the numbers in a schema
BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|[][{}]')  # of JSON; strings match too, to skip brackets in them


def checked(given: Any) -> dict[str, Any] | None:
    """Return a copy of a `response_format`, None for any text. Raises ValueError with a sentence."""
    given = _plain(given)  # first, as messages show it
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") not in TYPES:
        types = ", ".join(map(repr, TYPES))
        raise ValueError(f"response_format={shown(given)} must be an object whose 'type' is one of {types}.")
    kind = given["type"]
    fields = {name: value for name, value in given.items() if value is not None or name == kind}
    if fields.keys() != ({"type"} if kind in BARE else {"type", kind}):
        needs = "nothing" if kind in BARE else f"{kind!r} and nothing else"
        raise ValueError(f"response_format={shown(given)} must hold {needs} beside its type {kind!r}.")
    value: Any = fields.get(kind)
    if kind == "json_schema":
        _check_schema(value)
    elif kind in ("regex", "grammar") and (not isinstance(value, str) or not value.strip()):
        raise ValueError(f"response_format: {kind!r} must be a text that is not empty.")
    elif kind == "choice" and not (
        isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
    ):
        raise ValueError("response_format: 'choice' must be a list of texts that are not empty.")
    elif kind == "grammar":
        _check_parts(_schemas_in(value))
    return None if kind == "text" else fields


def check_together(params: SamplingParams) -> None:
    """Raise ValueError for parameters that do not go with a grammar."""
    for name, is_set, why in (
        ("ignore_eos", params.ignore_eos, "where a grammar ends, so does the output"),
        ("min_tokens", params.min_tokens > 0, "where a grammar ends, so does the output"),
        ("acceptance", params.acceptance not in (None, "exact"), "what a grammar allows is drawn exactly"),
    ):
        if is_set:
            value = getattr(params, name)
            raise ValueError(f"{name}={shown(value)} does not go with response_format: {why}; leave one out.")


def _check_schema(given: Any) -> None:
    """Check OpenAI's `json_schema`. The output matches the schema, whatever "strict" says."""
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        raise ValueError("response_format: 'json_schema' must be an object with a 'schema', an object too.")
    if unknown := [name for name in given if name not in FIELDS]:
        known = ", ".join(map(repr, FIELDS))
        raise ValueError(f"response_format: 'json_schema' holds {shown(unknown[0])}; known are {known}.")
    _check_parts([given["schema"]])


def _check_parts(parts: list[Any]) -> None:
    """Refuse schemas with which llguidance 1.9.1 ends the process: one text that has to match too many
    regular expressions at once, or a number too close to the least of 64 bits."""
    patterns, combines = set[str](), False
    while parts:
        part: Any = parts.pop()
        if isinstance(part, dict):
            combines |= "allOf" in part or ("$ref" in part and len(part) > 1)
            patterns |= {each for name in ("pattern", "format") if isinstance(each := part.get(name), str)}
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int | float) and part < LEAST:
            raise ValueError(f"response_format: a schema holds {shown(part)}; the least number is {LEAST}.")
    if combines and len(patterns) > MAX_PATTERNS:
        raise ValueError(
            f"response_format: a schema with 'allOf', or with anything beside '$ref', may have at most "
            f"{MAX_PATTERNS} different patterns and formats, not {len(patterns)}."
        )


def _schemas_in(grammar: str) -> list[Any]:
    """Return the schemas in a grammar, where `%json` begins one."""
    schemas = []
    for match in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # llguidance reports these
            schemas.append(json.JSONDecoder().raw_decode(grammar, match.end())[0])
    return schemas


def _plain(value: Any) -> Any:
    """Return a copy of plain data. Raises ValueError for anything else, and what is too long or too deep."""
    parts = json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value)
    try:
        text = "".join(islice(parts, MAX_BYTES + 1))  # each part has a character or more
        size = len(text.encode())
    except RecursionError:
        raise ValueError(TOO_LARGE) from None
    except (TypeError, ValueError):  # UnicodeEncodeError is one of the latter
        raise ValueError(
            "response_format must be plain data, as JSON has it: objects, lists, texts and finite numbers."
        ) from None
    levels = accumulate((part in "[{") - (part in "]}") for part in BRACKETS.findall(text))
    if size > MAX_BYTES or max(levels, default=0) > MAX_DEPTH:
        raise ValueError(TOO_LARGE)
    return json.loads(text)
