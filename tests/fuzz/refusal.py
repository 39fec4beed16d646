"""What counts as a refusal: one sentence of bounded length, raised as the code base raises them."""

from __future__ import annotations

from collections.abc import Callable
from json import JSONDecodeError
from typing import Any

LONGEST = 4000  # characters: some name eight tensors of each kind, by 100 characters
KINDS = (ValueError, OSError)
RAW = (UnicodeError, JSONDecodeError)  # kinds of ValueError that come from elsewhere


def answer(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What a function returns, None if it refuses; AssertionError if that is no sentence. Anything else that
    it raises goes on."""
    try:
        return function(*args, **named)
    except KINDS as error:
        check_sentence(error)
    return None


def check_sentence(error: BaseException) -> None:
    """AssertionError unless an exception reads as one of ours."""
    text = str(error)
    assert not isinstance(error, RAW), repr(error)[:300]
    assert text.endswith("."), f"no sentence: {text[:300]}"
    assert "\n" not in text, f"several lines: {text[:300]}"
    assert len(text) <= LONGEST, f"{len(text)} characters: {text[:300]}"
