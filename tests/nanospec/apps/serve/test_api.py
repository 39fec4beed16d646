"""The HTTP API, through OpenAI's client and with plain requests."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nanospec import LLM, SamplingParams
from nanospec.apps.serve.requests import MAX_MESSAGES, chat_prompt
from tests.nanospec.apps.serve.conftest import MODEL, Served
from tests.nanospec.test_llm import ALPHABET, EOS, TOKENS, after, greedy

PROMPT = after("abcd")
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]


def test_completion_matches_offline_generate(server: Served, offline: LLM) -> None:
    drawn = {"temperature": 30, "seed": -3, "n": 3}
    for options in {"temperature": 0}, {"temperature": 30, "seed": 7}, drawn:
        given = server.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, **options)  # type: ignore
        [expected] = offline.generate(PROMPT, SamplingParams(max_tokens=40, **options))  # type: ignore
        assert [choice.text for choice in given.choices] == [done.text for done in expected.outputs]
        assert [choice.index for choice in given.choices] == list(range(len(expected.outputs)))
        assert [c.finish_reason for c in given.choices] == [d.finish_reason for d in expected.outputs]
        assert given.usage is not None
        assert given.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert given.usage.completion_tokens == sum(len(done.token_ids) for done in expected.outputs)
        assert (given.object, given.model) == ("text_completion", MODEL)


def test_chat_applies_template(server: Served) -> None:
    parts: list[Any] = [{"type": "text", "text": PROMPT[:9]}, {"type": "text", "text": PROMPT[9:]}]
    several: list[Any] = [{"role": "system", "content": PROMPT[:3]}, {"role": "user", "content": PROMPT[3:]}]
    conversations: list[Any] = [CHAT, [{"role": "user", "content": parts}], several]
    for messages in conversations:
        for limit in ({}, {"max_tokens": 5}, {"max_completion_tokens": 5}):
            given = server.client().chat.completions.create(  # type: ignore[call-overload]
                model=MODEL, messages=messages, temperature=0, **limit
            )
            assert given.choices[0].message.content == ALPHABET[4 : 9 if limit else None]
            assert given.choices[0].message.role == "assistant"
            assert given.choices[0].finish_reason == ("length" if limit else "stop")
            assert given.object == "chat.completion"


def test_stream_matches_unstreamed_answer(server: Served) -> None:
    client = server.client()
    options: Any = {"model": MODEL, "max_tokens": 30, "n": 2, "temperature": 20, "seed": 3}
    whole = client.chat.completions.create(messages=CHAT, **options)
    texts, reasons, usage, roles = ["", ""], {}, None, []
    for chunk in client.chat.completions.create(
        messages=CHAT, **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert [reasons[i] for i in range(2)] == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant"] * 2
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    joined = ""
    for completion in client.completions.create(prompt=PROMPT, **{**options, "n": 1}, stream=True):
        joined += completion.choices[0].text
        assert completion.usage is None
    assert joined == client.completions.create(prompt=PROMPT, **{**options, "n": 1}).choices[0].text


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_continuous_usage_stats(server: Served, url: str) -> None:
    """As load generators request; the last count equals the total usage."""
    arguments = {"messages": CHAT} if "chat" in url else {"prompt": PROMPT}
    body = {**arguments, "max_tokens": 12, "n": 2, "temperature": 20, "seed": 3, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(server.post(url, {**body, "stream_options": options}).text)[:-1]
    result = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert len(set(result)) > 3
    assert result == sorted(result)
    assert result[-1] == last["usage"]["completion_tokens"] > 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    only = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert all("usage" not in chunk for chunk in events(server.post(url, only).text)[:-1])


def test_logprobs_with_and_without_streaming(server: Served, offline: LLM) -> None:
    [expected] = offline.generate(PROMPT, greedy(logprobs=2, max_tokens=9))
    assert expected.logprobs
    own = [at[token].logprob for token, at in zip(expected.token_ids, expected.logprobs)]
    ask: Any = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 9, "logprobs": True}
    client = server.client()
    whole = client.chat.completions.create(**ask, top_logprobs=2).choices[0].logprobs.content
    assert [place.logprob for place in whole] == own
    assert "".join(place.token for place in whole) == expected.text
    assert all(place.top_logprobs[0].token == place.token for place in whole)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**ask, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert streamed == whole
    options: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 9, "logprobs": 2}
    result = client.completions.create(**options).choices[0].logprobs
    assert result.token_logprobs == own
    assert result.text_offset == list(range(9))
    offsets: list[int] = []
    for completion in client.completions.create(**options, stream=True):
        offsets += completion.choices[0].logprobs.text_offset if completion.choices[0].logprobs else []
    assert offsets == list(range(9))


def test_logit_bias_penalties_and_extra_sampling_fields(server: Served, offline: LLM) -> None:
    z = ALPHABET.index("z")
    for theirs, ours in (
        ({"logit_bias": {str(z): 100}}, {"logit_bias": {z: 100}}),
        ({"presence_penalty": 2, "frequency_penalty": -2}, {"presence_penalty": 2, "frequency_penalty": -2}),
        ({"top_p": 0.3}, {"top_p": 0.3}),
        ({"extra_body": {"top_k": 2, "min_p": 0.1, "repetition_penalty": 1.5}},) * 2,
        ({"extra_body": {"min_tokens": 3, "stop_token_ids": [5], "ignore_eos": True}},) * 2,
    ):
        arguments: dict[str, Any] = {"temperature": 25, "seed": 5, "max_tokens": 20}
        given = server.client().completions.create(model=MODEL, prompt=PROMPT, **arguments, **theirs)
        [expected] = offline.generate(PROMPT, SamplingParams(**arguments, **ours.get("extra_body", ours)))  # type: ignore
        assert given.choices[0].text == expected.text, theirs


def test_several_prompts_as_text_and_token_ids(server: Served) -> None:
    client = server.client()
    prompts = [after("abc"), after("lmno")]
    given = client.completions.create(model=MODEL, prompt=prompts, max_tokens=3, temperature=0, n=2)
    assert [(c.index, c.text) for c in given.choices] == [(0, "def"), (1, "def"), (2, "pqr"), (3, "pqr")]
    for ids in ([0, 1, 2], [[0, 1, 2]], [[0, 1, 2], [4, 5]]):
        by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=2, temperature=0)
        assert [c.text for c in by_ids.choices] == ["de", "gh"][: len(by_ids.choices)]
        assert len(by_ids.choices) == (2 if ids[-1] == [4, 5] else 1)


def test_speculation_per_request_and_its_usage_fields(server: Served) -> None:
    arguments: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    stats = {}
    for k in (0, 3, None):
        given = server.client().completions.create(**arguments, extra_body={"num_speculative_tokens": k})
        assert given.choices[0].text == ALPHABET[4:24]
        usage = given.usage.model_dump()
        stats[k] = result = usage["speculation"]
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == result["num_accepted"]
        assert details["rejected_prediction_tokens"] == result["num_drafted"] - result["num_accepted"]
    assert (stats[0]["num_drafted"], stats[0]["tokens_per_step"]) == (0, 1)
    assert 1 < stats[3]["tokens_per_step"] <= 4
    assert stats[None]["tokens_per_step"] > stats[3]["tokens_per_step"]  # the engine's own K is 5


def test_include_drafts_reports_source_of_each_token(server: Served) -> None:
    options = {"include_usage": True, "include_drafts": True}
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True, "stream_options": options}
    chunks = events(server.post("/v1/completions", body).text)
    assert chunks.pop() == "[DONE]"
    steps = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    pieces = [piece for each in steps for piece in each["pieces"]]
    assert "".join(text for text, _ in pieces) == ALPHABET[4:24]
    copied = [(text, source) for text, source in pieces if source >= 0]
    assert copied
    assert all(
        PROMPT.replace("<e>", "#").replace("!é", "!~")[source] == text
        for text, source in copied
        if source < 26
    )
    usage = chunks[-1]["usage"]["speculation"]
    assert sum(each["drafted"] for each in steps) == usage["num_drafted"]
    assert sum(each["accepted"] for each in steps) == usage["num_accepted"] == len(copied)
    assert {each["drafter"] for each in steps if each["drafted"]} == {"ngram"}
    body |= {"prompt": after(ALPHABET), "max_tokens": 9}  # includes a step without text
    chunks = events(server.post("/v1/completions", body).text)[:-1]
    steps = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    assert sum(each["drafted"] for each in steps) == chunks[-1]["usage"]["speculation"]["num_drafted"] > 0


def events(text: str) -> list[Any]:
    """Return the data of server-sent events."""
    result = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in result]


def test_structured_output_with_and_without_speculation(server: Served) -> None:
    """Also with the field names of vLLM's server."""
    regex = {"type": "regex", "regex": "x(yz){3}[a-f]{2,9}"}
    body: Any = {"prompt": PROMPT, "max_tokens": 40, "temperature": 30, "response_format": regex}
    for seed in range(6):
        texts = set()
        for k in (0, None):
            arguments = {**body, "seed": seed, "num_speculative_tokens": k}
            given = server.post("/v1/completions", arguments).json()
            texts.add(given["choices"][0]["text"])
            assert given["choices"][0]["finish_reason"] == "stop"
            assert given["usage"]["speculation"]["num_accepted"] >= (0 if k == 0 else 5)  # yzyzyz is forced
            streamed = events(server.post("/v1/completions", {**arguments, "stream": True}).text)[:-1]
            texts.add("".join(chunk["choices"][0]["text"] for chunk in streamed))
        [text] = texts
        assert re.fullmatch(regex["regex"], text)
    chat: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 9}
    choice: Any = {"type": "choice", "choice": ["abc", "xyz"]}
    answer = server.client().chat.completions.create(**chat, response_format=choice)
    assert answer.choices[0].message.content in ("abc", "xyz")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}
    refused = server.post("/v1/chat/completions", {"messages": CHAT, "response_format": schema})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"
    assert "objekt" in refused.json()["error"]["message"]


def test_models_health_and_tokenize(server: Served, offline: LLM) -> None:
    [model] = server.client().models.list().data
    assert (model.id, model.owned_by) == (MODEL, "nanospec")
    assert model.model_dump()["max_model_len"] == 128
    health = server.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert server.client().models.retrieve(MODEL) == model
    assert server.get("/v1/models/other").status_code == 404
    ids = offline.tokenizer.encode(PROMPT)
    for arguments in ({"prompt": PROMPT}, {"messages": CHAT}):
        result = server.post("/tokenize", arguments).json()
        assert result == {"tokens": ids, "count": len(ids), "max_model_len": 128}
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": PROMPT}  # with special tokens
    bodies: list[Any] = [{"tokens": [99]}, {"tokens": "a"}, {"tokens": [True]}]
    for bad in [*bodies, {"tokens": [1], "model": "other"}]:
        assert server.post("/detokenize", bad).status_code in (400, 404)
    bodies = [{"messages": [1]}, {"messages": []}, {"messages": [{"role": "user"}]}, {"prompt": "a", "x": 1}]
    for bad in bodies:
        assert server.post("/tokenize", bad).status_code == 400


KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(("body", "param", "sentence"), [
    ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
    ({"steam": True}, "steam", "did you mean stream?"),
    ({"temperature": -1}, "temperature", "temperature=-1 must be"),
    ({"top_p": 0}, "top_p", "top_p=0 must be greater than 0"),
    ({"prompt": "a" * 200}, "prompt", "The prompt has 200 tokens"),
    ({"prompt": "a" * 4000}, "prompt", "4000 characters, too many"),
    ({"prompt": ""}, "prompt", "The prompt is empty"),
    ({"prompt": [1, 99]}, "prompt", "token id 99"),
    ({"prompt": 7}, "prompt", "must be a string"),
    ({"n": 16, "prompt": ["a"] * 21}, "n", "336 outputs"),
    ({"stop": ["x"] * 17}, "stop", "16 strings"),
    ({"stop": "x" * 257}, "stop", "256 characters"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 tokens, but the limit is 1024"),
    ({"echo": True}, "echo", "echo=True is not supported"),
    ({"stream_options": {}, "stream": 1}, "stream", "true or false"),
    ({"stream_options": {"x": True}}, "stream_options", "stream=true"),
    ({"stream_options": {"x": True}, "stream": True}, "stream_options", "'x' is unknown or not a boolean"),
    ({"stop_token_ids": [99]}, "stop_token_ids", "99"),
    ({"acceptance": "typical"}, "acceptance", "requires an engine"),
    ({"prompt": None}, "prompt", '"prompt" or "messages"'),
    ({KWARGS: {}}, KWARGS, "only supported by"),
    ({"prompt": "a", "messages": CHAT}, "messages", "only supported by"),
    ({"cache_salt": 1}, "cache_salt", "must be a string"),
    ({"messages": CHAT, KWARGS: True}, KWARGS, "object"),
    ({"messages": CHAT, KWARGS: {"self": 1}}, KWARGS, "self"),
    ({"messages": CHAT, KWARGS: {"chat_template": "{{ 1 }}"}}, KWARGS, "must not contain 'chat_template'"),
    ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "unknown"),
    ({"messages": CHAT, "reasoning_effort": "low"}, "reasoning_effort", "unknown"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools", "tools is not supported"),
    ({"messages": []}, "messages", "non-empty list"),
    ({"messages": [{"role": "user"}]}, "messages", 'needs a "role" and a "content"'),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "only text content is supported"),
], ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None)  # fmt: skip
def test_invalid_requests_are_rejected(server: Served, body: Any, param: str | None, sentence: str) -> None:
    is_chat = "messages" in body and "prompt" not in body
    response = server.post(
        "/v1/chat/completions" if is_chat else "/v1/completions", body if is_chat else {"prompt": "a", **body}
    )
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert sentence in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    server.settle()


def test_default_valued_unsupported_fields_are_accepted(server: Served) -> None:
    harmless: Any = {
        "model": None, "user": "u", "metadata": {}, "store": False, "tools": [], "tool_choice": "auto",
        "functions": None, "logit_bias": {}, "response_format": {"type": "text"}, "n": None, "stop": None,
        "max_tokens": 5, "stream_options": None, "prediction": {"type": "content", "content": "x"},
        "skip_special_tokens": True, "guided_decoding": None, "parallel_tool_calls": True, "temperature": 0,
    }  # fmt: skip
    history = [
        {"role": "assistant", "content": None, "tool_calls": [], "name": "x"},
        {"role": "developer", "content": [{"type": "text", "text": PROMPT}]},
    ]
    response = server.post("/v1/chat/completions", {"messages": history, **harmless})
    assert response.json()["choices"][0]["message"]["content"] == ALPHABET[4:9], response.text


def test_stop_string_is_excluded_and_reported(server: Served) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 9, "stop": ["never", "gh"]}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    chunks = events(server.post("/v1/completions", {**body, "stream": True}).text)[:-1]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == choice["text"] == "ef"
    for last in (choice, chunks[-1]["choices"][0]):
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "gh")


def test_role_is_sent_with_first_token(server: Served) -> None:
    """Load generators take the first event for the first token."""
    server.gate.clear()
    body = {"messages": CHAT, "stream": True, "temperature": 0, "max_tokens": 3}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        threading.Timer(0.3, server.gate.set).start()
        first = next(lines)
        assert server.gate.is_set()
        assert '"role":"assistant"' in first


@pytest.mark.parametrize(
    ("first", "params", "tokens"),
    [
        ("t", {"stop": ["xyz"]}, ["u", "v", "w"]),  # the stop string is excluded
        ("!", {"stop_token_ids": [TOKENS.index("a")]}, ["\ufffd"]),  # half a character, then a stop token
        ("©", {"ignore_eos": True, "stop_token_ids": [TOKENS.index(EOS) + 1]}, [EOS]),  # a token without text
        ("!", {"max_tokens": 1, "stop": ["\ufffd"]}, ["\ufffd"]),  # a stop string in the flushed remainder
        ("s", {"stop": ["vw"]}, ["t", "u"]),
        ("w", {}, ["x", "y", "z", " ", ".", "!\ufffd", "\ufffd"]),  # EOS is excluded
    ],
)
def test_logprobs_cover_tokens_of_the_text(
    server: Served, first: str, params: dict[str, Any], tokens: list[str]
) -> None:
    ask = {"prompt": [TOKENS.index(first)], "temperature": 0, "max_tokens": 9, "logprobs": 0, **params}
    [whole] = server.post("/v1/completions", ask).json()["choices"]
    chunks = events(server.post("/v1/completions", {**ask, "stream": True}).text)[:-1]
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    assert whole["text"] == "".join(choice["text"] for choice in streamed)
    for field in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for choice in streamed for value in (choice["logprobs"] or {}).get(field, [])]
        assert whole["logprobs"][field] == joined
    assert whole["logprobs"]["tokens"] == tokens
    assert whole["logprobs"]["top_logprobs"] is None
    offsets = whole["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 1, 2][: len(offsets)]
    assert offsets == sorted(offsets)
    assert offsets[-1] < max(len(whole["text"]), 1)


def test_logprobs_of_partial_characters_have_bytes(server: Served) -> None:
    messages = [{"role": "user", "content": after("yz")}]
    chat = {"messages": messages, "temperature": 0, "max_tokens": 9, "logprobs": True}
    content = server.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(place["bytes"]) for place in content).decode() == " .!é"


def test_cached_tokens_in_usage(server: Served) -> None:
    body = {"prompt": after("abcd"), "n": 4, "max_tokens": 1, "cache_salt": "cold"}
    usages = [server.post("/v1/completions", body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 32]


def test_openai_client_raises_its_errors(server: Served) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="model 'nobody' does not exist"):
        client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError, match="unknown field 'wishes'"):
        client.completions.create(model=MODEL, prompt="a", extra_body={"wishes": 3})


@pytest.mark.parametrize(
    ("content", "kind", "status", "sentence"),
    [
        (b"{", "application/json", 400, "not valid JSON"),
        (b"\xff\xfe{", "application/json", 400, "not valid JSON"),
        (b"[1]", "application/json", 400, "a JSON object"),
        (b"[" * 100_000, "application/json", 400, "not valid JSON"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "application/json", 400, "not valid JSON"),
        (b'{"prompt": "\\ud83d"}', "application/json", 400, "surrogate"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            "application/json",
            400,
            "unpaired surrogate, '\\ud83d'",
        ),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400, "NaN is not a finite number"),
        (b'{"prompt": "a", "' + b"x" * 100_000 + b'": 1}', "application/json", 400, "unknown field 'xxxx"),
        (b'{"prompt": "a", "\\ud800": 1}', "application/json", 400, "unknown field '\\ud800'"),
        (b'{"prompt": "a", "prompt": "b"}', "application/json", 400, "duplicate key 'prompt'"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "application/json", 400, "128 levels deep"),
        (b'{"prompt": "a"}', "text/plain", 415, "Content-Type"),
        (b"", "application/json", 400, "not valid JSON"),
    ],
)
def test_invalid_bodies(server: Served, content: bytes, kind: str, status: int, sentence: str) -> None:
    path = "chat/completions" if b"messages" in content else "completions"
    response = httpx.post(f"{server.url}/v1/{path}", content=content, headers={"content-type": kind})
    assert response.status_code == status
    assert sentence in response.json()["error"]["message"]
    assert len(response.content) < 1000


def test_unprintable_or_long_field_names_are_rejected(server: Served) -> None:
    for path, name in itertools.product(("/tokenize", "/detokenize"), ("\ud800", "x" * 100_000)):
        body = json.dumps({name: 1}).encode()
        response = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_field")
        assert len(response.content) < 1000


def test_unknown_paths_and_methods(server: Served) -> None:
    for request_line, status, message in (
        (
            "GET /v1/nothing",
            404,
            "Unknown path '/v1/nothing'. Available: /, /detokenize, /health, /metrics, ",
        ),
        ("GET /v1/completions", 405, "Method not allowed; use POST."),
        ("POST /", 405, "Method not allowed; use "),
    ):
        method, path = request_line.split()
        response = httpx.request(method, server.url + path)
        assert response.status_code == status
        assert response.json()["error"]["message"].startswith(message)


def test_every_response_has_request_id(server: Served) -> None:
    assert server.get("/health").headers["x-request-id"].startswith("req-")
    assert server.get("/health", headers={"x-request-id": "my-1.2"}).headers["x-request-id"] == "my-1.2"
    assert server.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
    given = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"})
    assert given.json()["id"] == "cmpl-mine"


def test_example_in_docs(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "serving.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    changes = {"http://localhost:8000": server.url, "smollm2-135m-instruct": MODEL}
    changes |= {"Name three colours, then name them again.": PROMPT}
    for theirs, ours in changes.items():
        assert theirs in example
        example = example.replace(theirs, ours)
    exec(example, {})
    printed = capsys.readouterr().out
    assert printed.startswith(ALPHABET[4:])
    assert "'tokens_per_step': " in printed


def test_number_of_messages_is_limited(offline: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "chat_prompt", lambda messages: [len(messages)])
    assert chat_prompt(offline, [{}] * MAX_MESSAGES, {}) == [MAX_MESSAGES]
    with pytest.raises(ValueError, match=f"messages has {MAX_MESSAGES + 1} entries, but the limit is"):
        chat_prompt(offline, [{}] * (MAX_MESSAGES + 1), {})
