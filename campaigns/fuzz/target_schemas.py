"""Fuzz `response_format`: it must compile and constrain an output, or give an error message."""

from __future__ import annotations

import json
import time
from typing import Any

from nanospec.config import SamplingParams
from nanospec.extras.grammar.grammar import Guide
from nanospec.extras.grammar.response_format import validate

from .mutation import mutate_json as mutate  # noqa: F401
from .refusal import answer
from .target_bodies import model

LIMIT = 5.0  # seconds
CHILDREN = {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3}
TREE = {"type": "object", "properties": {"c": CHILDREN}}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "x.*y"}}, "required": ["a"]},
    {"$defs": {"n": TREE}, "$ref": "#/$defs/n"},
    {"allOf": [{"type": "string", "pattern": f"x{i}.*"} for i in range(3)]},
    {"anyOf": [{"type": "integer", "minimum": 3, "multipleOf": 7}, {"const": "a"}, {"enum": [1, None, "b"]}]},
    {"type": "string", "format": "date-time", "minLength": 3, "maxLength": 40},
    {"type": "object", "patternProperties": {"^a": {"type": "number"}}, "additionalProperties": False},
]
OTHERS: list[dict[str, Any]] = [
    {"type": "regex", "regex": r"(a|b)*[c-e]{2,5}\d\s?"},
    {"type": "choice", "choice": ["red", "green"]},
    {"type": "grammar", "grammar": 'start: "a" b*\nb: "c" | /d+/ | "(" start ")"'},
    {"type": "grammar", "grammar": 'root ::= "a" [b-d]+ root?'},
    {"type": "json_object"},
]
FORMATS = [*({"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS), *OTHERS]
SEEDS = [json.dumps(each).encode() for each in FORMATS]


def one(data: bytes) -> None:
    start = time.perf_counter()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    answer(follow, value)
    assert time.perf_counter() - start < LIMIT


def follow(value: Any) -> None:
    """Compile a `response_format` and advance by a few allowed tokens."""
    params, llm = SamplingParams(response_format=value), model()
    llm.engine.check([1], params)
    if (response_format := validate(value)) is None:
        return
    guide: Guide = llm.grammars.guide(response_format)
    for _ in range(8):
        mask = guide.plan([1, 2], 2, 1, 4).masks[0]
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        if not allowed or guide.ended or guide.error:
            break
        guide.advance(allowed[-1:])
