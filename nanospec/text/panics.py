"""Libraries written in Rust end what they cannot do with a panic, which Python gets as an exception that no
`except Exception` catches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..files import reason

P = ParamSpec("P")
R = TypeVar("R")


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic; its class cannot be imported."""
    return type(error).__module__ == "pyo3_runtime"


def without_panics(function: Callable[P, R]) -> Callable[P, R]:
    """A function that raises ValueError where its library panics."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not is_panic(error):
                raise
            doing = function.__name__.strip("_")
            raise ValueError(
                f"the tokenizer's library cannot {doing} this ({reason(error)}); where that is no odd text, "
                "tokenizer.json is damaged: fetch it again."
            ) from error

    return called
