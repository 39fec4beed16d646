"""Arbitrary values passed to settings and `LLM` give a correct result or a short one-line error."""

import math
from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanospec import LLM, EngineConfig, SamplingParams, SpecConfig
from nanospec.apps.serve.settings import ServeConfig
from nanospec.text.validation import reason, shown
from tests.alphabet import make


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


LONG, NESTED = "x" * 100_000, list[Any]()
for _ in range(100_000):
    NESTED = [NESTED]
UNUSUAL_VALUES: list[Any] = [
    None, True, 0, -1, 10**9, 10**18, 10**40, 10**5000, 0.5, math.nan, math.inf, "", "auto", "none", "a\nb",
    LONG, "\ud800", "\0", b"abc", [], [1], ["a"], [LONG], [None], [10**400], {}, {"a": 1}, {LONG: LONG},
    {None: 1}, {1: 2.0}, {"9" * 5000: 1}, {"²": 1}, (), {1, 2}, NESTED, ["y"] * 99,
    range(10**9), np.int64(4), np.float32(0.5), np.bool_(True), np.arange(3), np.array(3), np.array([0.5, 1]),
    np.zeros(10**5), torch.tensor(3), torch.arange(3), Silent(), Decimal("0.5"), Fraction(1, 2),
    Fraction(10**400, 3), 1j, int, len, object(), SpecConfig(),
]  # fmt: skip
SETTINGS = (SamplingParams, SpecConfig, EngineConfig, ServeConfig)


def error_of(function: Callable[..., Any], *args: Any, **named: Any) -> str:
    """Call the function and return the message of its error, or "" without one; check the message's form."""
    try:
        function(*args, **named)
    except (ValueError, TypeError, FileNotFoundError) as error:
        text = str(error)
        assert text.endswith((".", "?")), text
        assert "\n" not in text
        assert len(text) <= 1000
        return text
    return ""


def test_shown_and_reason_are_short_lines() -> None:
    values: list[tuple[Any, str]] = [
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"), ("x" * 98, repr("x" * 98)),
        ("x" * 99, "'" + "x" * 96 + "..."), (10**5000, "<int>"), (NESTED, "<list>"), (Silent(), "<Silent>"),
    ]  # fmt: skip
    for value, text in values:
        assert shown(value) == text
    errors = ("a\n b. \n", "a b"), ("x" * 100, "x" * 100), ("x" * 101, "x" * 97 + "..."), ("", "ValueError")
    for words, text in errors:
        assert reason(ValueError(words)) == text
    assert reason("ab " * 68) == "ab " * 65 + "ab..."


@pytest.mark.parametrize("settings", SETTINGS)
def test_fields_accept_or_reject_any_value(settings: type) -> None:
    for field in fields(settings):
        for value in UNUSUAL_VALUES:
            text = error_of(settings, **{field.name: value})
            assert not text or field.name in text


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def test_prompts_and_conversations_accept_or_reject_any_value(llm: LLM) -> None:
    message, params = [{"role": "user", "content": "ab"}], SamplingParams(max_tokens=1)
    for value in UNUSUAL_VALUES:
        for prompt in (value, ["a", value], {"prompt": value}, {"prompt_token_ids": value}, {LONG: 1}):
            error_of(llm.generate, prompt, params)
        error_of(llm.generate, "a", value)
        error_of(llm.generate, ["a"], [value])
        error_of(lambda given: list(llm.stream(given)), value)
        error_of(lambda given: list(llm.stream("a", given)), value)
        error_of(llm.tokenizer.encode, value)
        error_of(SpecConfig.from_vllm, {"model": value})
        if not isinstance(value, str) or value == LONG:
            assert error_of(LLM, value).startswith("model=")
        error_of(llm.chat, value, params)
        error_of(llm.chat, [value], params)
        for name in ("chat_template", "chat_template_kwargs", "tools", "documents"):
            error_of(llm.chat, message, params, **{name: value})
    assert "characters, too many" in error_of(llm.chat, [{"role": "user", "content": "a" * 10**6}])
    with llm.shared.turn() as engine:
        assert not engine.has_work


def test_prompts_may_be_arrays_and_tensors(llm: LLM) -> None:
    one: list[Any] = [np.array([0, 1]), torch.tensor([0, 1]), np.array([0, 1], "u1"), range(2)]
    several = [torch.tensor([[0, 1], [0, 1]]), [one[1], one[0]], np.array(["ab", "ab"])]
    for prompts in one + several:
        for output in llm.generate(prompts, SamplingParams(max_tokens=1)):
            assert output.prompt_token_ids == [0, 1]
