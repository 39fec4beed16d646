"""`SamplingParams` rejects invalid values with a message that names the value and the limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from nanospec.config import SamplingParams
from nanospec.kernels import MAX_STOP_IDS

BIG = 2**31 - 1

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0 must be an integer from 1 to 1024."),
    ({"n": 1.0}, "n=1.0 must be an integer from 1 to 1024."),
    ({"n": True}, "n=True must be an integer from 1 to 1024."),
    ({"temperature": -0.1}, "temperature=-0.1 must be a number from 0 to 100."),
    ({"temperature": float("nan")}, "temperature=nan must be a number from 0 to 100."),
    ({"temperature": "hot"}, "temperature='hot' must be a number from 0 to 100."),
    ({"top_p": 0}, "top_p=0 must be greater than 0; use temperature=0 for greedy decoding."),
    ({"top_p": 1.01}, "top_p=1.01 must be a number from 0 to 1."),
    ({"top_k": -2}, f"top_k=-2 must be an integer from -1 to {BIG}."),
    ({"top_k": 2.0}, f"top_k=2.0 must be an integer from -1 to {BIG}."),
    ({"min_p": 1.5}, "min_p=1.5 must be a number from 0 to 1."),
    ({"seed": 2**63}, f"seed={2**63} must be an integer from {-(2**63)} to {2**63 - 1}."),
    ({"seed": 1.5}, "seed=1.5 must be an integer"),
    ({"max_tokens": 0}, f"max_tokens=0 must be an integer from 1 to {BIG}."),
    ({"min_tokens": -1}, f"min_tokens=-1 must be an integer from 0 to {BIG}."),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 must not exceed max_tokens=4."),
    ({"min_tokens": 17}, "min_tokens=17 must not exceed max_tokens=16."),
    ({"stop": ""}, "stop='' must be a non-empty string or a list of them."),
    ({"stop": ["a", ""]}, "stop=['a', ''] must be a non-empty string or a list of them."),
    ({"stop": 5}, "stop=5 must be a non-empty string or a list of them."),
    ({"stop": 0}, "stop=0 must be a non-empty string or a list of them."),
    ({"stop_token_ids": 0}, "stop_token_ids=0 must be a list of at most 24 token ids."),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of at most 24 token ids."),
    ({"stop_token_ids": range(25)}, "stop_token_ids=range(0, 25) must be a list of at most 24"),
    ({"stop_token_ids": [-1]}, f"stop_token_ids: token=-1 must be an integer from 0 to {BIG}."),
    ({"stop_token_ids": [True]}, "stop_token_ids: token=True must be an integer"),
    ({"stop_token_ids": "ab"}, "stop_token_ids='ab' must be a list of at most 24 token ids."),
    ({"stop_token_ids": ""}, "stop_token_ids='' must be a list of at most 24 token ids."),
    ({"stop_token_ids": ["1"]}, "stop_token_ids: token='1' must be an integer"),
    ({"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False."),
    ({"logprobs": 21}, "logprobs=21 must be an integer from 0 to 20."),
    ({"logprobs": -1}, "logprobs=-1 must be an integer from 0 to 20."),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be a number from -2 to 2."),
    ({"frequency_penalty": -3}, "frequency_penalty=-3 must be a number from -2 to 2."),
    ({"repetition_penalty": 0}, "repetition_penalty=0 must be a number from 0.01 to 100."),
    ({"repetition_penalty": 1e-45}, "repetition_penalty=1e-45 must be a number from 0.01 to 100."),
    ({"repetition_penalty": 1e38}, "repetition_penalty=1e+38 must be a number from 0.01 to 100."),
    ({"logit_bias": {7: 1e38}}, "logit_bias[7]=1e+38 must be a number from -1000000 to 1000000."),
    ({"logit_bias": [1]}, "logit_bias=[1] must map token ids to numbers."),
    ({"logit_bias": 0}, "logit_bias=0 must map token ids to numbers."),
    ({"logit_bias": {"1": 5, "01": -5}}, "logit_bias={'1': 5, '01': -5} has token 1 twice"),
    ({"logit_bias": {1: 5, "1": 5}}, "logit_bias={1: 5, '1': 5} has token 1 twice"),
    ({"logit_bias": {True: 1}}, "logit_bias: token=True must be an integer"),
    ({"logit_bias": {"a": 1}}, "logit_bias: token='a' must be an integer"),
    ({"logit_bias": {1.5: 1}}, "logit_bias: token=1.5 must be an integer"),
    ({"logit_bias": {7: "x"}}, "logit_bias[7]='x' must be a number from -1000000 to 1000000."),
    ({"logit_bias": {7: float("inf")}}, "logit_bias[7]=inf must be a number"),
    ({"logit_bias": {"9" * 5000: 1}}, "must be an integer from 0 to"),
    ({"num_speculative_tokens": 64}, "num_speculative_tokens=64 must be an integer from 0 to 63."),
    ({"num_speculative_tokens": "auto"}, "num_speculative_tokens='auto' must be an integer"),
    ({"tree_width": 9}, "tree_width=9 must be an integer from 1 to 8."),
    ({"acceptance": "any"}, "acceptance='any' is not supported; use one of exact, rejection, typical."),
]


def case_id(value: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items())[:80] if isinstance(value, dict) else ""


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=case_id)
def test_invalid_values_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    assert sentence in str(caught.value)


def test_every_field_has_an_invalid_case() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for options, _ in BAD for name in options} == fields - {"response_format"}


def test_unknown_arguments_raise_type_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_params_are_frozen_and_copy_their_arguments() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 1.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_shorthands_and_limits_are_accepted() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1}  # type: ignore[dict-item]
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (empty.stop, empty.stop_token_ids, empty.logit_bias) == ((), (), {})
    other = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), logit_bias={1: np.float32(2)})
    assert (type(other.max_tokens), type(other.temperature), type(other.logit_bias[1])) == (int, float, float)
    params = SamplingParams(stop_token_ids=[np.int64(3)], logit_bias={np.int32(4): 1})
    assert [type(t) for t in (*params.stop_token_ids, *params.logit_bias)] == [int, int]
    SamplingParams(top_p=1, top_k=-1, min_p=1, temperature=100, repetition_penalty=100)
    SamplingParams(seed=-(2**63), stop_token_ids=range(MAX_STOP_IDS - 8), logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=BIG)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {0: 1.0}},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
    ],
    ids=case_id,
)
def test_changes_logits(options: dict[str, Any]) -> None:
    assert SamplingParams(**options).changes_logits
    assert not SamplingParams(temperature=0.5, top_p=0.5, top_k=3, min_p=0.1).changes_logits
