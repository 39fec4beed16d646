"""Arbitrary values passed to settings and `LLM` give a correct result or a short one-line error."""

from __future__ import annotations

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
from hypothesis import given
from hypothesis import strategies as st

from nanospec import LLM, EngineConfig, SamplingParams, SpecConfig
from nanospec.apps.serve.settings import ServeConfig
from nanospec.config import check_names
from nanospec.device.resources import plan_cache
from nanospec.drafters.methods import resolve_drafters
from nanospec.text import reason, shown
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.test_llm import folder, make
from tests.tiny import tiny_model

__all__ = ["folder"]


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


LONG = "x" * 100_000
ODD: list[Any] = [
    None, True, 0, -1, 10**9, 10**18, 10**40, 10**5000, 0.5, math.nan, math.inf, "", "auto", "none", "a\nb",
    LONG, "\ud800", "\0", b"abc", [], [1], ["a"], [LONG], [None], [10**400], {}, {"a": 1}, {LONG: LONG},
    {None: 1}, {1: 2.0}, {"9" * 5000: 1}, {"²": 1}, (), {1, 2}, nested(100_000), ["y"] * 99,
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


SHOWN: list[tuple[Any, str]] = [
    ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
    ("x" * 98, repr("x" * 98)),
    ("x" * 99, "'" + "x" * 96 + "..."),
    ("x" * 10**6, "'" + "x" * 96 + "..."),
    ([10**90] * 10**4, "[1" + "0" * 90 + ", 100" + "..."),
    (10**5000, "<int>"),
    (nested(10**5), "<list>"),
    (Silent(), "<Silent>"),
]


def test_shown_is_at_most_100_characters() -> None:
    for value, text in SHOWN:
        assert shown(value) == text
        assert len(text) <= 100


def test_reason_is_one_short_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error, text in (
        (ValueError("a\n b. \n"), "a b"),
        (ValueError("x" * 100), "x" * 100),
        (ValueError("x" * 101), "x" * 97 + "..."),
        ("ab " * 68, "ab " * 65 + "ab..."),
        ("ab " * 67, "ab " * 66 + "ab"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute"),
    ):
        assert reason(error) == text


@pytest.mark.parametrize("settings", SETTINGS)
def test_fields_accept_or_reject_any_value(settings: type) -> None:
    for field in fields(settings):
        for value in ODD:
            text = error_of(settings, **{field.name: value})
            assert not text or field.name in text


@given(st.sampled_from(SETTINGS), st.data())
def test_combined_fields_accept_or_reject_any_value(settings: type, data: st.DataObject) -> None:
    names = st.sampled_from([field.name for field in fields(settings)])
    values = st.sampled_from(ODD) | st.integers() | st.floats() | st.text() | st.lists(st.integers())
    error_of(settings, **data.draw(st.dictionaries(names, values, max_size=4)))


def test_vllm_options_accept_or_reject_any_value() -> None:
    for value in ODD:
        error_of(check_names, {"swap_space": value, LONG: value}, EngineConfig)
        error_of(SpecConfig.from_vllm, value)
        for name in ("method", "model", "num_speculative_tokens", "draft_model"):
            error_of(
                lambda name, value: resolve_drafters(SpecConfig.from_vllm({name: value}), None), name, value
            )
        error_of(resolve_drafters, SpecConfig(), value)
        if not isinstance(value, str) or value == LONG:
            assert error_of(LLM, value).startswith("model=")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def test_prompts_accept_or_reject_any_value(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for value in ODD:
        for prompt in (value, ["a", value], {"prompt": value}, {"prompt_token_ids": value}, {LONG: 1}):
            error_of(llm.generate, prompt, params)
        error_of(llm.generate, "a", value)
        error_of(llm.generate, ["a"], [value])
        error_of(lambda given: list(llm.stream(given)), value)
        error_of(lambda given: list(llm.stream("a", given)), value)
        error_of(llm.tokenizer.encode, value)
        if not isinstance(value, range):
            error_of(llm.tokenizer.decode, [value])
    with llm.shared.turn() as engine:
        assert not engine.has_work


def test_conversations_accept_or_reject_any_value(llm: LLM) -> None:
    message, params = [{"role": "user", "content": "ab"}], SamplingParams(max_tokens=1)
    for value in ODD:
        error_of(llm.chat, value, params)
        error_of(llm.chat, [value], params)
        for name in ("chat_template", "chat_template_kwargs", "tools", "documents"):
            error_of(llm.chat, message, params, **{name: value})


def test_prompts_may_be_arrays_and_tensors(llm: LLM) -> None:
    def generated(prompts: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
        assert [output.token_ids[0] for output in outputs] == [
            output.prompt_token_ids[-1] + 1 for output in outputs
        ]
        return [output.prompt_token_ids for output in outputs]

    for ids in np.array([0, 1]), torch.tensor([0, 1]), np.array([0, 1], "u1"), range(2):
        assert generated(ids) == [[0, 1]]
        assert generated([ids, {"prompt_token_ids": ids}]) == [[0, 1]] * 2
    for several in torch.tensor([[0, 1], [2, 3]]), [torch.tensor([0, 1]), np.array([2, 3])]:
        assert generated(several) == [[0, 1], [2, 3]]
    assert generated(np.array(["ab", "cd"])) == [[0, 1], [2, 3]]  # its elements have no dimensions either
    assert generated([torch.tensor([0]), torch.tensor([1])]) == [[0], [1]]


def test_long_conversation_is_rejected_before_encoding(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was encoded"))
    assert "characters, too many" in error_of(llm.chat, [{"role": "user", "content": "a" * 10**6}])


def test_rows_exceeding_memory_are_rejected() -> None:
    config = EngineConfig(max_num_seqs=1 << 16, max_model_len=64, kv_cache_memory=64 << 20)
    with pytest.raises(ValueError, match="lower max_num_seqs"):
        plan_cache(config, tiny_model(vocab_size=200_000, hidden_size=16, num_layers=1))
