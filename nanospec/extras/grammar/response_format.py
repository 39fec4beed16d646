"""Check `SamplingParams(response_format=...)`, without the library that compiles it.

    {"type": "text"}                                      anything, as None
    {"type": "json_object"}                               a JSON object
    {"type": "json_schema", "json_schema": {"schema": {...}}}    beside it "name", "description", "strict"
    {"type": "regex", "regex": "..."}                     all of the output matches
    {"type": "grammar", "grammar": "..."}                 in Lark's notation or in GBNF
    {"type": "choice", "choice": ["...", ...]}            one of these texts

The first three are OpenAI's. It is plain data, so that JSON lines carry it. `grammar.py` compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...text.checks import shown

if TYPE_CHECKING:
    from ...config import SamplingParams

TYPES = ("text", "json_object", "json_schema", "regex", "grammar", "choice")
CONSTRAINTS = {"json": "json_schema"}  # what vLLM calls them: the type
CONSTRAINTS |= {kind: kind for kind in ("json_object", "regex", "choice", "grammar")}
BARE = ("text", "json_object")  # that have no field of their own
MAX_BYTES, MAX_DEPTH = 64 << 10, 64  # of a grammar
MAX_PATTERNS = 12  # that a schema may combine: each doubles what compiling takes, which is 8 GB for 30
LEAST = -9 * 10**18  # of the numbers in a schema


def checked(asked: Any) -> dict[str, Any] | None:
    """A copy of what was asked, None for any text. Raises ValueError with a sentence."""
    if asked is None:
        return None
    if isinstance(asked, Mapping):
        _check_size(asked)  # first, as messages show what was asked
    if not isinstance(asked, Mapping) or asked.get("type") not in TYPES:
        types = ", ".join(map(repr, TYPES))
        raise ValueError(f"response_format={shown(asked)} must be an object whose 'type' is one of {types}.")
    kind = asked["type"]
    found = {name: value for name, value in asked.items() if value is not None or name == kind}
    if found.keys() != ({"type"} if kind in BARE else {"type", kind}):
        needs = "nothing" if kind in BARE else f"{kind!r} and nothing else"
        raise ValueError(f"response_format={shown(asked)} must hold {needs} beside its type {kind!r}.")
    if kind == "json_schema":
        _check_schema(found[kind])
    elif kind in ("regex", "grammar") and (not isinstance(found[kind], str) or not found[kind].strip()):
        raise ValueError(f"response_format: {kind!r} must be a text that is not empty.")
    elif kind == "choice":
        _check_choice(found[kind])
    elif kind == "grammar":
        _check_grammar(found[kind])
    return None if kind == "text" else json.loads(json.dumps(found))


def of_vllm(name: str, asked: Any) -> dict[str, Any]:
    """Return the `response_format` for vLLM's structured outputs, a dict with one of `CONSTRAINTS`, given as
    the field `name` of a request. Raises TypeError for anything else."""
    given = dict(asked) if isinstance(asked, Mapping) else {}
    given = {what: value for what, value in given.items() if value is not None and value is not False}
    what, value = next(iter(given.items()), ("", None))
    if len(given) != 1 or what not in CONSTRAINTS:
        known = ", ".join(CONSTRAINTS)
        raise TypeError(f"{name}={shown(asked)} must hold one of {known}; its name here is response_format.")
    if what == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise TypeError(f"{name}: json={shown(value)} is no JSON: {error}.") from None
    if what == "json_object":
        return {"type": what}
    return {"type": CONSTRAINTS[what], CONSTRAINTS[what]: {"schema": value} if what == "json" else value}


def check_together(params: SamplingParams) -> None:
    """Raise ValueError where something else asks for what a grammar may not leave."""
    for name, asks, why in (
        ("ignore_eos", params.ignore_eos, "where a grammar ends, so does the output"),
        ("min_tokens", params.min_tokens > 0, "where a grammar ends, so does the output"),
        ("acceptance", params.acceptance not in (None, "exact"), "what a grammar allows is drawn exactly"),
    ):
        if asks:
            value = getattr(params, name)
            raise ValueError(f"{name}={shown(value)} does not go with response_format: {why}; leave one out.")


def _check_schema(given: Any) -> None:
    """OpenAI's `json_schema`. Whatever "strict" says, the schema is kept to."""
    kinds: dict[str, Any] = {"name": str, "description": str, "strict": bool | None, "schema": Mapping}
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), Mapping):
        raise ValueError("response_format: 'json_schema' must be an object with a 'schema', an object too.")
    for name, value in given.items():
        if name not in kinds:
            known = ", ".join(map(repr, kinds))
            raise ValueError(f"response_format: 'json_schema' holds {shown(name)}; known are {known}.")
        if not isinstance(value, kinds[name]) and not (name == "description" and value is None):
            raise ValueError(f"response_format: 'json_schema' has a bad {shown(name)}: {shown(value)}.")
    _check_parts(given["schema"])


def _check_parts(schema: Any) -> None:
    """Refuse a schema with which llguidance 1.9.1 ends the process, as it may ask of one text to match too
    many regular expressions at once, or because a number is too close to the least of 64 bits."""
    found, combines, parts = set[str](), False, [schema]
    while parts:
        part: Any = parts.pop()
        if isinstance(part, Mapping):
            combines |= "allOf" in part or ("$ref" in part and len(part) > 1)
            found |= {each for name in ("pattern", "format") if isinstance(each := part.get(name), str)}
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, int | float) and part < LEAST:
            raise ValueError(f"response_format: a schema holds {shown(part)}; the least number is {LEAST}.")
    if combines and len(found) > MAX_PATTERNS:
        raise ValueError(
            f"response_format: a schema with 'allOf', or with anything beside '$ref', may have at most "
            f"{MAX_PATTERNS} different patterns and formats, not {len(found)}."
        )


def _check_grammar(text: str) -> None:
    """Refuse the same in a grammar, where `%json` begins a schema."""
    for match in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):  # llguidance will say so
            continue
        _check_parts(schema)


def _check_choice(given: Any) -> None:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(t, str) and t for t in given):
        raise ValueError("response_format: 'choice' must be a list of texts that are not empty.")


def _check_size(found: Mapping[str, Any]) -> None:
    """Refuse what is no plain data, too long or too deep."""
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        inner = [part for one in level for part in (one.values() if isinstance(one, Mapping) else one)]
        level = [part for part in inner if isinstance(part, Mapping | list | tuple)][: MAX_BYTES + 1]
        if len(level) > MAX_BYTES:
            break  # what is the same at several places counts at each, as in JSON
    if level:
        limits = f"{MAX_DEPTH} levels deep and {MAX_BYTES:,} bytes long"
        raise ValueError(f"response_format must be at most {limits} as JSON.")
    try:
        size = len(json.dumps(found, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError):  # UnicodeEncodeError is one of the latter
        raise ValueError(
            "response_format must be plain data, as JSON has it: objects, lists, texts and finite numbers."
        ) from None
    if size > MAX_BYTES:
        raise ValueError(f"response_format takes {size:,} bytes as JSON; the limit is {MAX_BYTES:,}.")
