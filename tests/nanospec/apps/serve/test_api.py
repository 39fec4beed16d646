"""The HTTP API, through OpenAI's client and with plain requests."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from nanospec import LLM, SamplingParams
from nanospec.apps.openai_format import CHAT, COMPLETIONS, MAX_MESSAGES
from tests.alphabet import ALPHABET, EOS, TOKENS, after, greedy
from tests.nanospec.apps.serve.conftest import MODEL, Served

PROMPT = after("abcd")
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
JSON = {"content-type": "Application/JSON; charset=utf-8"}


def choices_of(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a response, and check that a streamed response is equal to it."""
    whole = server.post(path, body).json()
    *events, last = server.stream(path, body, include_usage=True, continuous_usage_stats=True)
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        if path == CHAT:
            assert choice["message"]["content"] == "".join(part["delta"].get("content", "") for part in parts)
            assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        else:
            assert choice["text"] == "".join(part["text"] for part in parts)
        for name in ("finish_reason", "stop_reason"):
            assert [part[name] for part in parts] == [None] * (len(parts) - 1) + [choice[name]]
        for name in choice["logprobs"] or ():
            joined = [value for part in parts for value in (part["logprobs"] or {}).get(name) or ()]
            assert joined == (choice["logprobs"][name] or []), name
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in [*events, last]} == {whole["usage"]["prompt_tokens"]}
    assert last["choices"] == []
    result: list[dict[str, Any]] = whole["choices"]
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0},
        {"seed": -3, "n": 3},
        {"logit_bias": {25: 100}},
        {"presence_penalty": 2, "frequency_penalty": -2, "top_p": 0.3},
        {"top_k": 2, "min_tokens": 3, "ignore_eos": True, "skip_special_tokens": False},
        {"response_format": {"type": "regex", "regex": "x(yz){3}[a-f]{2,9}"}},
        {"response_format": {"type": "choice", "choice": ["abc", "xyz"]}},  # as in vLLM's server
    ],
)
def test_completions_match_offline_generate(server: Served, offline: LLM, body: dict[str, Any]) -> None:
    body = {"temperature": 25, "seed": 5, "max_tokens": 40, **body}
    choices = choices_of(server, COMPLETIONS, {"prompt": PROMPT, **body})
    [expected] = offline.generate(PROMPT, SamplingParams(**body))
    assert [each["text"] for each in choices] == [done.text for done in expected.outputs]
    assert [each["index"] for each in choices] == list(range(len(expected.outputs)))
    assert len({each["text"] for each in choices}) == len(choices)  # each has its own seed
    assert [each["finish_reason"] for each in choices] == [done.finish_reason for done in expected.outputs]


def test_chat_applies_template(server: Served) -> None:
    """Send one and several messages. Fields without effect, and null fields, are accepted."""
    history = [
        {"role": "assistant", "content": None, "tool_calls": [], "name": "x"},
        {"role": "system", "content": PROMPT[:3]},
        {"role": "developer", "content": PROMPT[3:]},
    ]
    ignored: Any = {
        "model": None, "user": "u", "metadata": {}, "tools": [], "logit_bias": {}, "n": None, "stop": None,
        "stream_options": None, "guided_decoding": None,
    }  # fmt: skip
    for messages, more, length in ((MESSAGES, {}, None), (history, {"max_tokens": 5, **ignored}, 5)):
        [choice] = server.post(CHAT, {"messages": messages, "temperature": 0, **more}).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": ALPHABET[4:][:length]}
        assert choice["finish_reason"] == ("length" if length else "stop")


@pytest.mark.parametrize("n", [1, 2])
def test_prediction_is_drafted_and_counted(server: Served, n: int) -> None:
    """It is not part of the prompt. Hits of lookup in the prompt, which come first, are not counted."""
    text = ALPHABET[4:]
    for prediction, counts in (
        (None, (0, 0)),
        (text, (5 * n, 21 * n)),
        ([{"type": "text", "text": part} for part in (text[:9], text[9:])], (5 * n, 21 * n)),
        ("!", (0, n)),
    ):
        body: dict[str, Any] = {"temperature": 0, "n": n}
        if prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": PROMPT})):
            result = server.post(path, {**body, **prompt, "max_tokens": 50}).json()
            usage, details = result["usage"], result["usage"]["completion_tokens_details"]
            assert tuple(details.values()) == counts, (path, prediction)
            choices = result["choices"]
            assert [c.get("text", c.get("message", {}).get("content")) for c in choices] == [text] * n
            assert usage["prompt_tokens"] == len(server.post("/tokenize", prompt).json()["tokens"])


def test_final_assistant_message_is_continued(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response has only the new text, and /tokenize has the same prompt."""
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}{{ 'x' if add_generation_prompt }}"
    monkeypatch.setattr(server.llm.tokenizer, "_templates", {"default": template})
    messages = [*MESSAGES, {"role": "assistant", "content": "abc"}]
    for options, text, prompt in (
        ({}, "defg", PROMPT + "!abc"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "defg", PROMPT + "!abc"),
        ({"add_generation_prompt": True}, "yz .", PROMPT + "!abc!x"),
    ):
        body = {"messages": messages, **options}
        [choice] = choices_of(server, CHAT, {**body, "temperature": 0, "max_tokens": 4})
        assert choice["message"]["content"] == text
        ids = server.post("/tokenize", body).json()["tokens"]
        assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": prompt}


def test_template_options_reach_the_template(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ 'abc' if enable_thinking else 'lmn' }}{{ reasoning_effort }}"
    monkeypatch.setattr(server.llm.tokenizer, "_templates", {"default": template})
    fields = {"reasoning_effort": "low", "verbosity": "low", "thinking": {"type": "enabled"}}
    for body, text in (
        (fields, "x"),  # after "low"
        ({"thinking": {"type": "disabled"}}, "o"),
        ({"thinking": {"type": "enabled"}}, "d"),
        ({"enable_thinking": True}, "d"),
        ({"thinking": True, KWARGS: {"enable_thinking": False}}, "o"),
    ):
        [choice] = choices_of(server, CHAT, {"messages": MESSAGES, "temperature": 0, "max_tokens": 1, **body})
        assert choice["message"]["content"] == text
    [choice] = choices_of(server, COMPLETIONS, {"prompt": "a", "temperature": 0, "max_tokens": 1, **fields})
    assert choice["text"] == "b"


def test_several_prompts_as_text_and_token_ids(server: Served) -> None:
    for prompt, texts in (
        ([after("abc"), after("lmno")], ["de", "de", "pq", "pq"]),
        ([0, 1, 2], ["de", "de"]),
        ([[0, 1, 2], [4, 5]], ["de", "de", "gh", "gh"]),
    ):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "n": 2}
        choices = choices_of(server, COMPLETIONS, body)
        assert [(each["index"], each["text"]) for each in choices] == list(enumerate(texts))


@pytest.mark.parametrize(
    ("first", "params", "tokens"),
    [
        ("t", {"stop": ["never", "xyz"]}, ["u", "v", "w"]),  # the stop string is excluded
        ("!", {"stop_token_ids": [TOKENS.index("a")]}, ["\ufffd"]),  # half a character, then a stop token
        ("©", {"ignore_eos": True, "stop_token_ids": [TOKENS.index(EOS) + 1]}, [EOS]),  # a token without text
        ("!", {"max_tokens": 1, "stop": ["\ufffd"]}, ["\ufffd"]),  # a stop string in the flushed remainder
        ("w", {}, ["x", "y", "z", " ", ".", "!\ufffd", "\ufffd"]),  # EOS is excluded
    ],
)
def test_logprobs_cover_tokens_of_the_text(
    server: Served, first: str, params: dict[str, Any], tokens: list[str]
) -> None:
    body = {"prompt": [TOKENS.index(first)], "temperature": 0, "max_tokens": 9, "logprobs": 0, **params}
    [choice] = choices_of(server, COMPLETIONS, body)
    assert choice["logprobs"]["tokens"] == tokens
    assert choice["logprobs"]["top_logprobs"] is None
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 1, 2][: len(offsets)]
    assert offsets == sorted(offsets)
    assert offsets[-1] < max(len(choice["text"]), 1)
    assert choice["stop_reason"] == (params.get("stop") or params.get("stop_token_ids") or [None])[-1]


def test_logprobs_match_offline(server: Served, offline: LLM) -> None:
    [expected] = offline.generate(after("wx"), greedy(logprobs=2, max_tokens=9))
    own = [at[token].logprob for token, at in zip(expected.token_ids, expected.logprobs)][:-1]  # without EOS
    common = {"temperature": 0, "max_tokens": 9}
    body = {**common, "messages": [{"role": "user", "content": after("wx")}]}
    [chat] = choices_of(server, CHAT, {**body, "logprobs": True, "top_logprobs": 2})
    places = chat["logprobs"]["content"]
    assert [place["logprob"] for place in places] == own
    assert b"".join(bytes(place["bytes"]) for place in places).decode() == "yz .!é"  # é is in two tokens
    assert all(place["top_logprobs"][0]["token"] == place["token"] for place in places)
    assert {len(place["top_logprobs"]) for place in places} == {2}
    [choice] = choices_of(server, COMPLETIONS, {**common, "prompt": after("wx"), "logprobs": 2})
    assert choice["logprobs"]["token_logprobs"] == own
    assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {2}


def test_include_drafts_reports_source_of_each_token(server: Served) -> None:
    """The server has tracing enabled, so it also reports the texts of rejected drafts."""
    rejected: set[str] = set()
    # One prompt has rejected drafts, one a step without text.
    for prompt, temperature in (("abcabdabcabd", 30), (after(ALPHABET), 0), (PROMPT, 0)):
        body = {"prompt": prompt, "max_tokens": 20, "temperature": temperature, "seed": 4}
        events = server.stream(COMPLETIONS, body, include_usage=True, include_drafts=True)
        steps = [event["speculation"] for event in events if "speculation" in event]
        usage = events[-1]["usage"]["speculation"]
        assert sum(step["drafted"] for step in steps) == usage["num_drafted"] > 0
        num_accepted = sum(step["accepted"] for step in steps)
        assert num_accepted == usage["num_accepted"]
        texts = [text for step in steps for text in step["rejected"]]
        assert len(texts) == usage["num_drafted"] - num_accepted
        rejected |= set(texts)
        assert {step["drafter"] for step in steps if step["drafted"]} == {"ngram"}
        assert all(event["usage"] is None for event in events[:-1])
    assert {"a", "b", "c", "d"} & rejected
    pieces = [piece for step in steps for piece in step["pieces"]]
    assert "".join(text for text, _ in pieces) == ALPHABET[4:24]
    copied = [(text, source) for text, source in pieces if source >= 0]
    assert len(copied) == usage["num_accepted"]
    assert all(PROMPT[source] == text for text, source in copied if source < 26)
    for options in ({}, {"continuous_usage_stats": True}, {"include_usage": False}):
        events = server.stream(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3}, **options)
        assert not any({"usage", "speculation"} & event.keys() for event in events)


def test_models_and_tokenization(server: Served, offline: LLM) -> None:
    [model] = server.get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == (MODEL, "nanospec", 128)
    assert model["speculation"] == {"method": "ngram", "max_tokens": 5, "tokens": 5}
    assert server.get(f"/v1/models/{MODEL}").json() == model
    ids = offline.tokenizer.encode(PROMPT)
    for body in ({"prompt": PROMPT}, {"messages": MESSAGES, "model": MODEL}):
        result = server.post("/tokenize", body).json()
        assert result == {"tokens": ids, "count": len(ids), "max_model_len": 128}
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": PROMPT}  # with special tokens
    assert server.post("/detokenize", {"tokens": [0, len(TOKENS) - 1]}).status_code == 200


KWARGS, TEXT, CHATS = "chat_template_kwargs", {"prompt": "a"}, {"messages": MESSAGES}
INVALID: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, {**TEXT, "max_token": 3}, "max_token", "did you mean max_tokens?"),
    (COMPLETIONS, {"prompt": "a" * 200}, "prompt", "The prompt has 200 tokens"),
    (COMPLETIONS, {"prompt": ["a"] * 21, "n": 16}, "n", "336 outputs"),
    (COMPLETIONS, {**TEXT, "stop": ["x"] * 17}, "stop", "16 strings"),
    (COMPLETIONS, {**TEXT, "logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "limit is 1024"),
    (COMPLETIONS, {**TEXT, "stream": 1}, "stream", "stream=1 must be true or false"),
    (COMPLETIONS, {**TEXT, "stream_options": {"x": True}}, "stream_options", "requires stream=true"),
    (COMPLETIONS, {**TEXT, "stream_options": {"x": True}, "stream": True}, "stream_options", "'x' is un"),
    (COMPLETIONS, {**TEXT, KWARGS: {"x": 1}}, KWARGS, 'requires "messages"'),
    (COMPLETIONS, {**TEXT, "cache_salt": "x" * 257}, "cache_salt", "must be a string of at most 256"),
    (COMPLETIONS, {**TEXT, "logit_bias": dict.fromkeys(range(1024), 1)}, "logit_bias", "id 33"),
    (COMPLETIONS, {**TEXT, "suffix": "b"}, "suffix", "put both parts into the prompt"),
    (CHAT, {**CHATS, "web_search_options": {}}, "web_search_options", "web_search_options is not supported."),
    (CHAT, {**CHATS, "enable_thinking": "false"}, "enable_thinking", "='false' must be true or false"),
    (CHAT, {**CHATS, "reasoning_effort": 3}, "reasoning_effort", "reasoning_effort=3 must be a string"),
    (CHAT, {**CHATS, "continue_final_message": 1}, "continue_final_message", "must be true or false"),
    (CHAT, {**CHATS, KWARGS: True}, KWARGS, "object"),
    (CHAT, {**CHATS, "prediction": "abc"}, "prediction", "must be an object such as"),
    (CHAT, {**CHATS, "prediction": {"type": "content", "content": [1]}}, "prediction", "only text content"),
    (CHAT, {**CHATS, "prediction": {"type": "content", "content": "\ud800"}}, "prediction", "surrogate"),
    (CHAT, {**CHATS, KWARGS: {"x": 1}}, None, "does not use 'x'"),
    (CHAT, {**CHATS, KWARGS: {"chat_template": "{{ 1 }}"}}, KWARGS, "must not contain 'chat_template'"),
    ("/tokenize", {**TEXT, "xy": 1}, "xy", "unknown field 'xy'"),
    ("/tokenize", {**TEXT, **CHATS}, "prompt", 'either "prompt" or "messages", got '),
    ("/detokenize", {"tokens": [len(TOKENS)]}, "tokens", f"ids from 0 to {len(TOKENS) - 1}."),
    (CHAT, {"messages": MESSAGES * (MAX_MESSAGES + 1)}, "messages", f"has {MAX_MESSAGES + 1} entries"),
    (COMPLETIONS, {"prompt": [[5]] * (MAX_MESSAGES + 1)}, "prompt", f"has {MAX_MESSAGES + 1} entries"),
    ("/detokenize", {"tokens": [True]}, "tokens", "must be a list of token ids"),
    (COMPLETIONS, b"[" * 100_000, None, "not valid JSON"),
    (COMPLETIONS, b"[1]", None, "a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "what"), INVALID, ids=lambda value: str(value)[:40])
def test_invalid_requests_are_rejected(server: Served, path: str, body: Any, param: Any, what: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)  # with surrogates
    response = server.ask("POST", path, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert what in error["message"]
    assert error["code"] == ("unknown_field" if "unknown field" in error["message"] else None)
    assert error["param"] == param
    assert len(response.content) < 1000
    assert not server.app.engine.num_outputs


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("GET", "/v1/no", {}, 404, "Unknown path '/v1/no'; the server has /, /detokenize, /health, "),
        ("POST", "/v1/completions/", {}, 404, "Unknown path '/v1/completions/'; the server has /, "),
        ("GET", COMPLETIONS, {}, 405, "Method not allowed; use POST."),
        ("GET", "/v1/models/other", {}, 404, "The model 'other' does not exist. Available: 'alphabet'."),
        ("POST", "/detokenize", {"json": {"model": "x"}}, 404, "The model 'x' does not exist."),
        ("POST", COMPLETIONS, {"headers": {"content-type": "text/plain"}}, 415, "Unsupported"),
    ],
)
def test_unknown_paths_methods_models_and_media_types(
    server: Served, method: str, path: str, options: dict[str, Any], status: int, message: str
) -> None:
    response = server.ask(method, path, **options)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)


def test_every_response_has_request_id(server: Served) -> None:
    for given, pattern in (("", "req-.*"), ("my-1.2", "my-1.2"), ("a b", "req-.*"), ("x" * 65, "req-.*")):
        response = server.get("/v1/models", headers={"x-request-id": given})
        assert re.fullmatch(pattern, response.headers["x-request-id"])
    for path, body, answer_id in ((COMPLETIONS, TEXT, "cmpl-mine"), (CHAT, CHATS, "chatcmpl-mine")):
        response = server.post(path, {**body, "max_tokens": 1}, headers={"x-request-id": "mine"})
        assert response.json()["id"] == answer_id


def test_openai_client_parses_responses_and_errors(server: Served) -> None:
    """Responses have the client's types, and errors raise its exceptions."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)
    options: Any = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    chat = client.chat.completions.create(messages=MESSAGES, **options, logprobs=True)
    assert chat.choices[0].logprobs.content[0].token == chat.choices[0].message.content[0] == "e"
    completion = client.completions.create(prompt=PROMPT, **options)
    assert (completion.object, completion.model) == ("text_completion", MODEL)
    chunks = list(client.chat.completions.create(messages=MESSAGES, **options, stream=True))
    assert {(chunk.object, chunk.usage) for chunk in chunks} == {("chat.completion.chunk", None)}
    assert client.models.retrieve(MODEL) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="model 'unknown' does not exist"):
        client.completions.create(model="unknown", prompt="a")


def test_example_in_docs(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "serving.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    changes = {"http://localhost:8000": server.url, "smollm2-135m-instruct": MODEL}
    changes |= {"Name three colours, then name them again.": PROMPT}
    for text, replacement in changes.items():
        assert text in example
        example = example.replace(text, replacement)
    exec(example, {})
    printed = capsys.readouterr().out
    assert printed.startswith(ALPHABET[4:])
    assert "'tokens_per_step': " in printed
