"""Anthropic's Messages API and OpenAI's Responses API, through the official clients."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from nanospec import SamplingParams
from nanospec.apps.serve import anthropic_messages, app, jobs, openai_responses
from nanospec.apps.serve.anthropic_messages import COUNT_TOKENS, MESSAGES
from nanospec.apps.serve.openai_responses import RESPONSES
from nanospec.apps.serve.requests import APIRequest
from nanospec.apps.tool_calls.parser import Part
from nanospec.outputs import Completion, Piece, SpecStats
from tests.alphabet import ALPHABET, after, make
from tests.nanospec.apps.serve.conftest import MODEL, Served, serving

PROMPT, KEY = after("abcd"), "a-key-of-tests"
HISTORY: Any = [{"role": "user", "content": PROMPT[:9]}, {"role": "assistant", "content": PROMPT[9:]}]
GREEDY: Any = {"model": MODEL, "extra_body": {"temperature": 0}}  # Anthropic's client lacks the field


PARTS: dict[str, Part] = {
    "j": Part("", 0, "call_0", "add"), "k": Part('{"a": "é', 0),
    "l": Part('"}', 0), "m": Part("", 1, "call_1", "sub"), "n": Part('{"b": 1}', 1),
}  # fmt: skip


class Letters:
    """A parser for which the letters from j to n are two calls."""

    def push(self, text: str, ended: bool = False) -> list[Part]:
        return [PARTS.get(letter, Part(letter)) for letter in text]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(make(folder), api_key=(KEY,), max_body=9000) as server:
        yield server


@pytest.fixture(scope="module")
def clients(served: Served) -> tuple[anthropic.Anthropic, openai.OpenAI]:
    options: Any = {"api_key": KEY, "max_retries": 0, "timeout": 20}
    claude = anthropic.Anthropic(base_url=served.url, **options)
    return claude, openai.OpenAI(base_url=f"{served.url}/v1", **options)


def message_of(client: Any, **body: Any) -> dict[str, Any]:
    """Return a message, and check that the streamed one is equal to it."""
    body = {"max_tokens": 50, **GREEDY, **body}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    fields = {"id", "usage"}
    assert whole.model_dump(exclude=fields) == streamed.model_dump(exclude={*fields, "parsed_output"})
    for usage in (whole.usage, streamed.usage):
        inputs = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counted = {name: body[name] for name in ("model", "messages", "system") if name in body}
        assert inputs == client.messages.count_tokens(**counted).input_tokens
    assert streamed.usage.cache_read_input_tokens  # found in the cache after the first request
    return whole.model_dump()


def response_of(client: Any, **body: Any) -> Any:
    """Return a response, and check that the streamed one is equal to it."""
    body = {**GREEDY, **body}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response() if whole.status == "completed" else None
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    for each in filter(None, (streamed, last.response)):
        assert [item.type for item in each.output] == [item.type for item in whole.output]
        assert each.output_text == whole.output_text
        assert each.usage.input_tokens == whole.usage.input_tokens
        assert each.usage.input_tokens_details.cached_tokens > 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    return whole


def test_messages(clients: Any) -> None:
    """Send a system prompt, several turns and stop sequences, and sample with a seed."""
    user = [{"role": "user", "content": [{"type": "text", "text": PROMPT, "cache_control": None}]}]
    [block] = (message := message_of(clients[0], messages=user))["content"]
    assert (block["type"], block["text"]) == ("text", ALPHABET[4:])
    assert (message["stop_reason"], message["role"], message["model"]) == ("end_turn", "assistant", MODEL)
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=a1b2;"}
    turns = [*HISTORY, {"role": "user", "content": "abcd"}]
    system: Any = [header, {"type": "text", "text": "xyz"}]
    message = message_of(clients[0], messages=turns, system=system, stop_sequences=["zz", "hij"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "hij")
    assert message["content"][0]["text"] == "efg"
    ignored: Any = {"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}
    message = message_of(clients[0], messages=user, max_tokens=3, **ignored)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)
    message_of(clients[0], messages=user, extra_body={"temperature": 25, "seed": 5})


def test_responses(clients: Any) -> None:
    response = response_of(clients[1], input=PROMPT)
    assert (response.output_text, response.status) == (ALPHABET[4:], "completed")
    assert (response.object, response.model, response.tool_choice) == ("response", MODEL, "auto")
    turns = [*HISTORY, {"role": "user", "content": [{"type": "input_text", "text": "abcd"}]}]
    ignored: Any = {"store": True, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}
    response = response_of(clients[1], input=turns, instructions="xyz", max_output_tokens=3, **ignored)
    assert response.output_text == "efg"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    schema: Any = {"type": "json_schema", "name": "n", "schema": {"const": True}, "strict": True}
    assert response_of(clients[1], input=PROMPT, text={"format": schema}).output_text == "true"
    response_of(clients[1], input=PROMPT, extra_body={"temperature": 25, "seed": 5})


def test_message_continues_prefill(clients: Any) -> None:
    prefill = {"role": "assistant", "content": PROMPT[-2:]}
    message = message_of(clients[0], messages=[{"role": "user", "content": PROMPT[:-2]}, prefill])
    assert message["content"][0]["text"] == ALPHABET[4:]


def test_calls(clients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response may end within a call."""
    read: Any = app.read_request
    monkeypatch.setattr(app, "read_request", lambda *a, **more: replace(read(*a, **more), parser=Letters))
    message = message_of(clients[0], messages=[{"role": "user", "content": PROMPT}])
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use", "text"]
    calls = [(each["id"], each["name"], each["input"]) for each in message["content"][1:3]]
    assert calls == [("call_0", "add", {"a": "é"}), ("call_1", "sub", {"b": 1})]
    output = response_of(clients[1], input=PROMPT).output
    assert [item.type for item in output] == ["message", "function_call", "function_call", "message"]
    assert output[0].content[0].text + output[3].content[0].text == ALPHABET[4:9] + ALPHABET[14:]
    calls = [(each.call_id, each.name, each.arguments) for each in output[1:3]]
    assert calls == [("call_0", "add", '{"a": "é"}'), ("call_1", "sub", '{"b": 1}')]
    cut = response_of(clients[1], input=PROMPT, max_output_tokens=7).output[-1]
    assert (cut.type, cut.status, cut.arguments) == ("function_call", "incomplete", '{"a": "é')


FUNCTION: Any = {"name": "f", "description": "d"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
CHAT: dict[str, Any] = {  # the translation of the two requests below
    "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "t", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "c", "content": "Error: 3"}, {"role": "user", "content": "e"},
    ],
    "max_tokens": 1, "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {}}},
}  # fmt: skip


def texts(*parts: str) -> Any:
    return [{"type": "text", "text": part} for part in parts]


def test_whole_responses_include_the_end_of_an_incomplete_character() -> None:
    """Only streams get it as a piece, when the output ends."""
    done = Completion(
        "a\ufffd", [7], "length", None, None, None, [Piece("a", -1)], SpecStats(), 1, 1, 0, 0, 1
    )
    request = APIRequest("", [[1]], SamplingParams(), False, frozenset(), b"")
    given: Any = request, "id", MODEL, None
    assert anthropic_messages.AnthropicFormat(*given).whole([done])["content"][0]["text"] == done.text
    [item] = openai_responses.ResponsesFormat(*given).whole([done])["output"]
    assert item["content"][0]["text"] == done.text


def test_translation_of_messages() -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "é"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": texts("1", "2")}
    error = {**result, "content": "3", "is_error": True}
    thought = {"type": "thinking", "thinking": "h"}
    body: dict[str, Any] = {
        "system": texts("x-anthropic-billing-header: cch=1;", "s"), "max_tokens": 1, "messages": [
            {"role": "user", "content": "a"}, {"role": "user", "content": texts("b")},
            {"role": "assistant", "content": [thought, *texts("t"), use, use]},
            {"role": "user", "content": [result, error, *texts("e")]},
        ],
        "tools": [{**FUNCTION, "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    }  # fmt: skip
    translate = anthropic_messages.translate
    assert translate(body) == {**CHAT, "stop": None}
    for kind, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert translate({**body, "tool_choice": {"type": kind}})["tool_choice"] == expected


def test_translation_of_responses() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": "é"}', "id": "fc"}
    result = {"type": "function_call_output", "call_id": "c", "output": texts("1\n", "2")}
    body: dict[str, Any] = {
        "instructions": "s", "max_output_tokens": 1, "parallel_tool_calls": False, "input": [
            {"role": "user", "content": "a"}, {"type": "message", "role": "user", "content": texts("b")},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "t"}]}, call, call,
            result, {**result, "output": "Error: 3"}, {"role": "user", "content": "e"},
        ],
        "tools": [{**FUNCTION, "type": "function", "parameters": {"type": "object"}, "strict": None}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "output", "schema": {}}},
    }  # fmt: skip
    assert openai_responses.translate(body) == CHAT
    assert openai_responses.translate({**body, "tool_choice": "required"})["tool_choice"] == "required"


USER: Any = {"messages": [{"role": "user", "content": "a"}]}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "data": "x" * 4000}}
INVALID: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"max_token": 1}, "unknown field 'max_token'; did you mean max_tokens?"),
    (MESSAGES, {"n": 2, "logprobs": True}, "unknown field 'logprobs'"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens=0 must be"),
    (MESSAGES, {"messages": []}, '"messages" must be a non-empty list, got [].'),
    (MESSAGES, {"messages": [1]}, '"role" must be a string, got None.'),
    (MESSAGES, {"messages": [{"role": "user"}]}, '"content" must be a non-empty list, got None.'),
    (MESSAGES, {"messages": [{"role": "tool", "content": "a"}]}, "the role 'tool'; use"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "content\" contains {'type': 'image'",
    ),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, '"tool_use_id"'),
    (MESSAGES, {"messages": [{"role": "user", "content": "a" * 200}]}, "The prompt has 200 tokens"),
    (MESSAGES, {"stop_sequences": 1}, "stop=1 must be"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only functions are supported"),
    (MESSAGES, {"tool_choice": {"name": "f"}}, "must be one of auto, any, none, tool."),
    (MESSAGES, {"tool_choice": {"type": []}}, "must be one of auto, any, none, tool."),
    (COUNT_TOKENS, {"max_tokens": None, "x": 1}, "unknown field 'x'"),
    (RESPONSES, {"input": {}}, '"input" must be a non-empty list'),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "contains {'type': 'input_i",
    ),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "contains 'item_reference', but"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}, '"name" must be a string'),
    (
        RESPONSES,
        {"input": "a", "previous_response_id": "x"},
        "requires stored responses; send",
    ),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "only functions are supported"),
    (RESPONSES, {"input": "a", "text": 1}, '"text" must be an object'),
    (RESPONSES, {"input": "a", "max_tokens": 1}, "unknown field 'max_tokens'"),
]


@pytest.mark.parametrize(("path", "body", "message"), INVALID, ids=lambda value: str(value)[:40])
def test_invalid_requests_are_rejected(served: Served, path: str, body: Any, message: str) -> None:
    body = body if path == RESPONSES else {"max_tokens": 1, **USER, **body}
    response = served.post(path, {"model": MODEL, **body}, headers={"x-api-key": KEY})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], "param" in error) == ("invalid_request_error", path == RESPONSES)
    assert message in error["message"]
    assert len(response.content) < 1000


def test_errors_raise_exceptions_of_the_clients(
    served: Served, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(status: int, kind: str, **change: Any) -> None:
        body = {"max_tokens": 1, **USER, **GREEDY, **change}
        with pytest.raises(anthropic.APIStatusError) as raised:
            clients[0].with_options(**options).messages.create(**body)
        assert (raised.value.status_code, raised.value.type) == (status, kind)
        with pytest.raises(openai.APIStatusError) as given:
            clients[1].with_options(**options).responses.create(model=body["model"], input=body["messages"])
        assert given.value.status_code == status

    options: Any = {}
    check(404, "not_found_error", model="x")
    check(413, "request_too_large", messages=[{"role": "user", "content": "x" * 9000}])
    monkeypatch.setattr(served.app.engine, "limit", 0)
    check(429, "rate_limit_error")
    options = {"api_key": "wrong"}
    check(401, "authentication_error")


def test_events_of_slow_and_failed_streams(
    served: Served, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request times out: before that, quiet streams send pings."""
    monkeypatch.setattr(jobs, "QUIET_AFTER", 0.05)
    monkeypatch.setitem(served.app.config.__dict__, "request_timeout", 0.2)
    served.gate.clear()
    body: Any = {"max_tokens": 9, **USER, **GREEDY}
    with pytest.raises(anthropic.APIStatusError, match="timed out"):
        clients[0].messages.create(**body)
    with pytest.raises(anthropic.APIError, match="timed out"):
        list(clients[0].messages.create(**body, stream=True))
    raw = served.post(MESSAGES, {"max_tokens": 9, **USER, "stream": True}, headers={"x-api-key": KEY}).text
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw
    *_, last = clients[1].responses.create(input="a", model=MODEL, stream=True)
    assert last.type == "response.failed"
    assert "timed out" in str(last.response.error)
