"""Validation of `response_format`."""

import json
from typing import Any

import pytest

from nanospec.config import SamplingParams
from nanospec.extras.grammar.response_format import check_conflicts, validate

ANY_JSON = {"type": "json_object"}
DEEP: Any = []
for _ in range(61):  # one level too many within three objects
    DEEP = [DEEP]
WIDE: Any = []
for _ in range(50):
    WIDE = [WIDE, WIDE]
COMBINED = {"items": {"allOf": [{"type": "string", "pattern": f"x{i}.*y"} for i in range(13)]}}


def schema(of: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"enum": of}, **more}}


def grammar(of: Any) -> dict[str, Any]:
    return {"type": "grammar", "grammar": f"start: A | B\nA: /a/\nB: %json {json.dumps(of)}"}


BAD: list[tuple[Any, str]] = [
    ("json", "response_format='json' must be an object whose 'type' is one of 'text'"),
    ({"type": "xml"}, "response_format={'type': 'xml'} must be an object whose 'type'"),
    ({"type": "regex"}, "must have exactly the fields 'type' and 'regex'."),
    ({**ANY_JSON, "x": 1}, "must have only the field 'type'."),
    ({"type": "regex", "regex": " "}, "'regex' must be a non-empty string."),
    ({"type": "unknown", "wide": WIDE}, "64 levels deep and 65,536 bytes long as JSON."),
    ({"type": "choice", "choice": ["a", ""]}, "a non-empty list of non-empty strings."),
    ({"type": "choice", "choice": ["\ud800"]}, "must be valid JSON: objects"),
    (schema(DEEP), "must be at most 64 levels deep and 65,536 bytes long as JSON."),
    (schema({}, shape=1), "unknown field 'shape'; 'json_schema' has 'name'"),
    (grammar(COMBINED), "may have at most 12 different patterns and formats"),
    (schema([1 - 2**63]), "must be at least -9000000000000000000, got -9223372036854775807"),
    (schema([], schema={"minimum": -1e300}), "must be at least -9000000000000000000, got -1e+300"),
    (grammar({"const": -(2**63)}), "-9000000000000000000, got -9223372036854775808"),
    ({"type": "json_schema", "json_schema": {}}, "must be an object with the object 'schema'"),
]


def test_invalid_response_format_is_rejected() -> None:
    for fmt, sentence in BAD:
        with pytest.raises(ValueError) as caught:
            validate(fmt)
        assert sentence in str(caught.value)


def test_params_incompatible_with_grammar_are_rejected() -> None:
    for name, value in {"ignore_eos": True, "min_tokens": 1, "acceptance": "typical"}.items():
        other: Any = {name: value}
        with pytest.raises(ValueError, match=f"^{name}={value!r} conflicts with response_format"):
            check_conflicts(SamplingParams(response_format=ANY_JSON, **other))
    check_conflicts(SamplingParams(response_format=ANY_JSON, acceptance="exact"))


def test_format_is_copied_and_text_means_none() -> None:
    fmt: Any = schema(["a"], name="x", strict=None, description=None)
    copied = validate(fmt)
    assert copied == fmt
    fmt["json_schema"]["schema"]["enum"].append("b")
    assert copied != fmt
    assert validate({"type": "text"}) is validate(None) is None
    assert validate({**ANY_JSON, "json_schema": None}) == ANY_JSON
    largest = {"type": "regex", "regex": "a" * (65536 - 30)}
    for fmt in (schema(DEEP[0]), schema([], schema={"minimum": -9 * 10**18}), largest):
        assert validate(fmt) == fmt
