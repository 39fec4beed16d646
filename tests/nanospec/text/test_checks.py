"""What messages quote of bad values is short, whatever the value is."""

from __future__ import annotations

from typing import Any

import pytest

from nanospec.text.checks import shown


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (None, "None"),
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
        (list(range(9)), str(list(range(9)))),
        ("x" * 98, repr("x" * 98)),
        ("x" * 99, "'" + "x" * 96 + "..."),
        ("x" * 10**6, "'" + "x" * 96 + "..."),
        ([10**90] * 10**4, "[1" + "0" * 90 + ", 100" + "..."),
        (10**5000, "<int>"),
        (nested(10**5), "<list>"),
        (Silent(), "<Silent>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_in_at_most_100_characters(value: Any, text: str) -> None:
    assert shown(value) == text
    assert len(text) <= 100
