"""OpenAI's batch format: fields keep OpenAI's meaning, and unsupported fields are rejected by name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from nanospec.apps.batch.lines import LineError, num_tokens, result_line
from nanospec.apps.openai_format import BYTES, usage
from nanospec.config import SamplingParams
from nanospec.outputs import Completion, Logprob, RequestOutput, SpecStats
from tests.nanospec.apps.batch.test_run import tasks_of_lines
from tests.tiny import tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**body: Any) -> dict[str, Any]:
    body = {"model": "gpt-5", "messages": HELLO, **body}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def completions(**body: Any) -> dict[str, Any]:
    return {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "Once", **body}}


def test_missing_fields_take_openai_defaults(tmp_path: Path) -> None:
    a, b = tasks_of_lines(tmp_path, chat(), completions(), system="Be brief.")
    assert a.params == SamplingParams(temperature=0, max_tokens=None)
    assert b.params == SamplingParams(temperature=0, max_tokens=16)
    assert a.messages == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (b.prompt, b.messages, b.raw, b.names) == ("Once", None, True, {"custom_id": "b"})
    params = SamplingParams(max_tokens=9)
    for task in tasks_of_lines(tmp_path, chat(), completions(), params=params, sets_max_tokens=True):
        assert task.params == params


def test_request_fields_are_parsed(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]}]
    kept: dict[str, Any] = {"stop": "x", "temperature": 0.5, "n": 2, "seed": 3, "top_k": 7}
    predicted = {"prediction": {"type": "content", "content": [{"type": "text", "text": "ab"}]}}
    dropped = {"user": "u", "stream": False, "tools": None, "response_format": {"type": "text"}}
    counts = {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -100}}
    [task] = tasks_of_lines(tmp_path, chat(messages=parts, **kept, **dropped, **counts, **predicted))
    assert task.messages == HELLO
    assert task.params == SamplingParams(
        max_tokens=5, logprobs=2, logit_bias={5: -100}, prediction="ab", **kept
    )
    own = tasks_of_lines(tmp_path, *({"prompt": "x", "prediction": text} for text in ("ab", [1, 2])))
    assert [task.params.prediction for task in own] == ["ab", [1, 2]]
    without = completions(prompt=[1, 2])
    del without["custom_id"]
    result = tasks_of_lines(tmp_path, completions(prompt=["x"], logprobs=3), without, without)[:2]
    assert [(task.prompt, task.params.logprobs) for task in result] == [("x", 3), ([1, 2], None)]


def test_template_options_are_parsed(tmp_path: Path) -> None:
    off: dict[str, Any] = {"thinking": False, "enable_thinking": False}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"continue_final_message": True, "reasoning_effort": "low", "verbosity": "high"}, {}),
        ({"thinking": {"type": "disabled"}}, off),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, {**off, "thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({**off, "chat_template_kwargs": {"enable_thinking": True}}, {**off, "enable_thinking": True}),
    ]
    for fields, options in cases:
        given = tasks_of_lines(tmp_path, chat(**fields), {"messages": HELLO, **fields})
        assert [task.template_options for task in given] == [options or fields] * 2
        assert len({task.key for task in (*given, *tasks_of_lines(tmp_path, chat()))}) == 3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (chat(tools=[{"type": "function"}]), 'in "body": tools contains'),
        (completions(tools=[{"type": "function", "function": {"name": "f"}}]), "only supported by /v1/chat"),
        (chat(max_tokens=3, max_completion_tokens=4), "differ; set only one"),
        ({"prompt": "x", "custom_id": "a"}, 'custom_id "a" is also used by line 1'),
        (chat(top_logprobs=3), '"top_logprobs" requires it to be true'),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "only text content is"),
        (completions(echo=True), "echo=True is not supported; prepend the prompt"),
        (completions(continue_final_message=True), 'continue_final_message requires "messages"'),
        ({**chat(), "method": "GET"}, '"method" "POST"'),
        ({**chat(), "temperature": 1}, "unknown field 'temperature'; request parameters belong in \"body\""),
    ],
    ids=range(10),
)
def test_unsupported_fields_are_rejected(tmp_path: Path, line: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LineError, match=f"line 2: .*{re.escape(sentence)}"):
        tasks_of_lines(tmp_path, chat(), line)


def test_usage_counts_prefix_hits_once_per_prompt() -> None:
    [done] = output().outputs
    outputs = [replace(done, index=i, num_cached_tokens=16 * (i + 1)) for i in range(4)]
    assert usage(99, outputs, 2)["prompt_tokens_details"] == {"cached_tokens": 16 + 48}


def test_byte_characters_match_gpt2() -> None:
    text = "".join(map(chr, range(1, 2048)))
    [[letters, _]] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes(map(BYTES.__getitem__, letters)) == text.encode()
    assert BYTES.keys() == set(ByteLevel.alphabet())


def output(error: str | None = None, n: int = 1) -> RequestOutput:
    places = [{7: Logprob(-1.0, 2, "<7>"), 5: Logprob(-0.5, 1, "<5>")}]
    done = Completion("g", [7], "length", None, None, places, [], SpecStats(), 1.0, 1.0, 0, 0, 1)
    last = replace(done, finish_reason="abort" if error else "length", error=error)
    return RequestOutput("request-3", None, [1, 2], [*[done] * (n - 1), last])


def test_results_use_format_of_the_request(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    half = "half \ud83d"  # a lone surrogate
    openai_lines = chat(logprobs=True, top_logprobs=2), {**completions(logprobs=1), "custom_id": half}
    a, b, plain_task = tasks_of_lines(tmp_path, *openai_lines, {"prompt": "x", "id": half})

    def line(task: Any, **given: Any) -> Any:
        return json.loads(result_line(task, output(**given), "small", tokenizer))

    first = line(a)
    response = first.pop("response")
    body = response.pop("body")
    assert first == {"id": f"batch_req_{a.key}", "custom_id": "a", "error": None}
    assert response == {"status_code": 200, "request_id": "request-3"}
    assert (body["object"], body["model"]) == ("chat.completion", "small")
    assert body["usage"]["total_tokens"] == 3
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "g"}
    assert choice["finish_reason"] == "length"
    assert [top["token"] for top in choice["logprobs"]["content"][0]["top_logprobs"]] == ["<5>", "<7>"]
    second = line(b)
    assert second["custom_id"] == half
    [choice] = second["response"]["body"]["choices"]
    assert choice["text"] == "g"
    assert choice["logprobs"]["top_logprobs"] == [{"<5>": -0.5}]
    failed = line(a, error="NaN", n=2)
    assert (failed["response"], failed["error"]) == (None, {"code": "engine_error", "message": "NaN"})
    plain = line(plain_task)
    assert (plain["index"], plain["key"], plain["id"], plain["text"]) == (2, plain_task.key, half, "g")
    assert [done["text"] for done in line(plain_task, n=2)["outputs"]] == ["g", "g"]
    assert num_tokens(output(n=2)) == 2
