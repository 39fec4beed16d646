"""JSON from users is parsed as Python parses it, or rejected with a one-line message."""

import json
from codecs import BOM_UTF8
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.apps.json_input import MAX_DEPTH, strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=20)
@given(VALUES)
def test_accepts_output_of_json_dumps(value: Any) -> None:
    assert strict_json(json.dumps(value).encode()) == value
    assert strict_json(BOM_UTF8 + json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary() | st.text(alphabet='{}[]",:01eE-.NaInfity\\ud8 \n').map(str.encode))
def test_invalid_json_gets_short_message(text: bytes) -> None:
    try:
        result = strict_json(text)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 200
    else:
        assert result == json.loads(text)


DEEP = "nested more than 128 levels deep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"b": {"c": 1, "a": 1, "a": 1}}', "duplicate key 'a'"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1e999]", "1e999 is not a finite number"),
        (b'{"a": ' * MAX_DEPTH + b"[]" + b"}" * MAX_DEPTH, DEEP),
        (b"[" * 100_000 + b"]" * 100_000, DEEP),
    ],
    ids=range(5),
)
def test_values_without_a_meaning_are_rejected(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        strict_json(text)
    assert strict_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
