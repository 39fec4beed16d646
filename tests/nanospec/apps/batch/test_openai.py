"""OpenAI's batch format: fields keep OpenAI's meaning, and unsupported fields are rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanospec.apps.batch.lines import LineError
from nanospec.apps.batch.run import result_line
from nanospec.config import SamplingParams
from nanospec.outputs import Completion, Logprob, RequestOutput, SpecStats
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.apps.batch.test_run import tasks_of_lines
from tests.tiny import tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**body: Any) -> dict[str, Any]:
    body = {"model": "gpt-5", "messages": HELLO, **body}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def completions(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Once", **body}}


def test_missing_fields_take_openai_defaults(tmp_path: Path) -> None:
    a, b = tasks_of_lines(tmp_path, chat(), {**completions(), "custom_id": "b"})
    assert a.params == SamplingParams(temperature=1, max_tokens=None)
    assert b.params == SamplingParams(temperature=1, max_tokens=16)
    assert (a.messages, b.prompt, b.raw, b.names) == (HELLO, "Once", True, {"custom_id": "b"})
    lines, sampling = (chat(), {**completions(), "custom_id": 1}), {"temperature": 0, "max_tokens": 9}
    for task in tasks_of_lines(tmp_path, *lines, sampling=sampling):
        assert task.params == SamplingParams(temperature=0, max_tokens=9)


def test_system_message_does_not_apply_to_completions(tmp_path: Path) -> None:
    a, b = tasks_of_lines(tmp_path, chat(), {**completions(), "custom_id": "b"}, system="Be brief.")
    assert a.messages == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (b.prompt, b.messages, b.raw) == ("Once", None, True)


def test_request_fields_are_parsed(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]}]
    body = {
        "messages": parts, "max_completion_tokens": 5, "stop": "x", "temperature": 0.5, "top_p": 0.9, "n": 2,
        "seed": 3, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 1, "presence_penalty": -1,
        "logit_bias": {"5": -100}, "user": "u", "stream": False, "tools": None, "top_k": 7,
        "response_format": {"type": "text"},
    }  # fmt: skip
    [task] = tasks_of_lines(tmp_path, chat(**body))
    assert task.messages == HELLO
    assert task.params == SamplingParams(
        max_tokens=5, stop="x", temperature=0.5, top_p=0.9, n=2, seed=3, logprobs=2, frequency_penalty=1,
        presence_penalty=-1, logit_bias={5: -100}, top_k=7,
    )  # fmt: skip
    without = completions(prompt=[1, 2])
    del without["custom_id"]
    result = tasks_of_lines(tmp_path, completions(prompt=["x"], logprobs=3), without, without)[:2]
    assert [(task.prompt, task.params.logprobs) for task in result] == [("x", 3), ([1, 2], None)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (chat(tools=[{"type": "function"}]), 'in "body": tools is not supported'),
        (chat(response_format={"type": "json"}), "response_format={'type': 'json'} must be an object whose"),
        (chat(stream=True), "stream=True is not supported"),
        (chat(max_tokens=3, max_completion_tokens=4), "have the same meaning"),
        ({"prompt": "x", "custom_id": "a"}, 'custom_id "a" is also used by line 1'),
        (chat(custom_id="b"), "unknown field 'custom_id'; known fields are acceptance, "),
        (chat(max_token=3), "unknown field 'max_token'; did you mean max_tokens?"),
        (chat(top_logprobs=3), '"top_logprobs" requires it to be true'),
        (chat(messages=None), '"messages" must be a non-empty list'),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "only text content is supported",
        ),
        (completions(prompt=["x", "y"]), '"prompt" must be a string'),
        (completions(echo=True), "echo=True is not supported"),
        ({**chat(), "method": "GET"}, '"method" "POST"'),
        ({**chat(), "temperature": 1}, 'request parameters belong in "body"'),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_unsupported_fields_are_rejected(tmp_path: Path, line: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LineError) as caught:
        tasks_of_lines(tmp_path, chat(), line)
    assert "line 2: " in str(caught.value)
    assert sentence in str(caught.value)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def output(error: str | None = None) -> RequestOutput:
    places = [{7: Logprob(-1.0, 2, "<7>"), 5: Logprob(-0.5, 1, "<5>")}]
    reason = "abort" if error else "length"
    done = Completion("g", [7], reason, None, error, places, [], SpecStats(), 1.0, 1.0, 0, 0, 1)
    return RequestOutput("request-3", None, [1, 2], [done])


@pytest.mark.parametrize("line", [chat(), {"prompt": "x"}], ids=["theirs", "ours"])
def test_custom_id_may_contain_lone_surrogate(
    tmp_path: Path, tokenizer: Tokenizer, line: dict[str, Any]
) -> None:
    [task] = tasks_of_lines(tmp_path, {**line, "custom_id": "half \ud83d"})
    assert json.loads(result_line(task, output(), "small", tokenizer))["custom_id"] == "half \ud83d"


def test_results_use_openai_format(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = chat(logprobs=True, top_logprobs=2), {**completions(logprobs=1), "custom_id": "b"}
    a, b = tasks_of_lines(tmp_path, *lines)
    line = json.loads(result_line(a, output(), "small", tokenizer))
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    body = line["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "small")
    counts = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert counts.items() <= body["usage"].items()
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "g"}
    assert choice["finish_reason"] == "length"
    [place] = choice["logprobs"]["content"]
    assert (place["token"], place["logprob"], place["bytes"]) == ("<7>", -1.0, list(b"<7>"))
    assert [top["token"] for top in place["top_logprobs"]] == ["<5>", "<7>"]
    [choice] = json.loads(result_line(b, output(), "small", tokenizer))["response"]["body"]["choices"]
    assert choice["text"] == "g"
    assert choice["logprobs"]["token_logprobs"] == [-1.0]
    assert choice["logprobs"]["top_logprobs"] == [{"<5>": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0]
    failed = json.loads(result_line(a, output("NaN"), "small", tokenizer))
    assert (failed["response"], failed["error"]["message"]) == (None, "NaN")
