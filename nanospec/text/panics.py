"""Libraries written in Rust end what they cannot do with a panic, which Python gets as an exception that no
`except Exception` catches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..models.files import reason

P = ParamSpec("P")
R = TypeVar("R")


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic; its class cannot be imported."""
    return type(error).__module__ == "pyo3_runtime"


def without_panics(sentence: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function raise ValueError where its library panics: a sentence in which {} is the reason."""

    def changed(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not is_panic(error):
                    raise
                raise ValueError(sentence.format(reason(error))) from error

        return called

    return changed
