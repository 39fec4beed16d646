"""What counts as a refusal: one sentence of bounded length, raised as the code base raises them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import Any

LONGEST = 4000  # characters: some name eight tensors of each kind, by 100 characters
WORD = 160  # characters of what is quoted, of which no more than 100 are to be, or of a path
KINDS = (ValueError, OSError)
RAW = (UnicodeError, JSONDecodeError)  # kinds of ValueError that come from elsewhere


def answer(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What a function returns, None if it refuses; AssertionError if that is no sentence, or names none of
    the files that it was given. Anything else that it raises goes on."""
    try:
        return function(*args, **named)
    except KINDS as error:
        check_sentence(error)
        check_names(str(error), [arg for arg in args if isinstance(arg, Path)])
    return None


def check_names(text: str, given: Sequence[Path]) -> None:
    """AssertionError unless a text names one of the files given, or one in a folder given."""
    within = [file for path in given if path.is_dir() for file in path.iterdir()]
    names = [str(path) for path in given] + [path.name for path in (*given, *within)]
    assert not names or any(name in text for name in names), f"no file is named: {text[:300]}"


def check_sentence(error: BaseException) -> None:
    """AssertionError unless an exception reads as one of ours."""
    text = str(error)
    assert not isinstance(error, RAW), repr(error)[:300]
    assert text.endswith("."), f"no sentence: {text[:300]}"
    assert "\n" not in text, f"several lines: {text[:300]}"
    assert len(text) <= LONGEST, f"{len(text)} characters: {text[:300]}"
    longest = max(text.split(), key=len)
    assert len(longest) <= WORD, f"{len(longest)} characters are quoted: {text[:300]}"
