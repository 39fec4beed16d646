"""Checks of error messages: one sentence of limited length, raised as ValueError or OSError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import Any

LONGEST = 4000  # maximum characters of a message: some quote eight tensor names per kind, 100 characters each
WORD = 160  # maximum characters of a word, which may be a quoted value (100) or a path
KINDS = (ValueError, OSError)
RAW = (UnicodeError, JSONDecodeError)  # subclasses of ValueError that other libraries raise


def answer(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function and return its result, or None if it raises a proper ValueError or OSError. Raises
    AssertionError if the message is not a sentence or names none of the file arguments."""
    try:
        return function(*args, **named)
    except KINDS as error:
        check_sentence(error)
        check_names(str(error), [arg for arg in args if isinstance(arg, Path)])
    return None


def check_names(text: str, paths: Sequence[Path]) -> None:
    """Raise AssertionError unless a message names one of the paths, or a file in one of them."""
    within = [file for path in paths if path.is_dir() for file in path.iterdir()]
    names = [str(path) for path in paths] + [path.name for path in (*paths, *within)]
    assert not names or any(name in text for name in names), f"the message names no file: {text[:300]}"


def check_sentence(error: BaseException) -> None:
    """Raise AssertionError unless the message of an exception is a sentence of limited length."""
    text = str(error)
    assert not isinstance(error, RAW), repr(error)[:300]
    assert text.endswith((".", "?")), f"not a sentence: {text[:300]}"  # "did you mean ...?"
    assert "\n" not in text, f"more than one line: {text[:300]}"
    assert len(text) <= LONGEST, f"{len(text)} characters: {text[:300]}"
    longest = max(text.split(), key=len)
    assert len(longest) <= WORD, f"a word of {len(longest)} characters: {text[:300]}"
