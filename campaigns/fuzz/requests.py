"""Fuzz targets that read requests: bodies and response formats."""

from __future__ import annotations

import json
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanospec.apps.openai_format import CHAT, COMPLETIONS
from nanospec.apps.serve.gate import HTTPError
from nanospec.apps.serve.requests import APIRequest, read_json, read_request
from nanospec.config import EngineConfig, SamplingParams
from nanospec.engine.request import Limits
from nanospec.extras.grammar.grammar import Grammars, Guide
from nanospec.extras.grammar.response_format import validate
from nanospec.llm import LLM
from nanospec.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

from . import Target
from .errors import answer
from .mutation import mutate_json

WINDOW, VOCAB = 64, 300
Json = dict[str, Any]


def encoded(values: list[Json]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


@cache
def model() -> Any:
    """Return the parts of an `LLM` that are needed to read a request, without weights."""
    folder = Path(tempfile.mkdtemp())
    tiny_tokenizer(folder)
    template = "{{ style }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    limits, grammars = Limits(EngineConfig(), VOCAB, WINDOW, tokenizer), Grammars(tokenizer, VOCAB)

    def check_params(params: Any) -> Any:
        grammars.check(params)
        return limits.check_params(params)

    engine = SimpleNamespace(max_model_len=WINDOW, check_params=check_params, limits=limits)
    llm = SimpleNamespace(tokenizer=tokenizer, engine=engine, grammars=grammars)
    llm.default_params = SamplingParams()
    llm.chat_prompt = lambda messages, **options: LLM.chat_prompt(llm, messages, **options)  # type: ignore
    return llm


# ---- bodies: the server returns a valid request or an error message --------------------------------------

PARTS = [{"type": "text", "text": "a"}]
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PARTS}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}
NUMBERS = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "n": 2, "logprobs": 3}
PENALTIES = {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 3}}
BODIES: list[Json] = [
    {"prompt": "hello", "max_tokens": 3, **NUMBERS, "stop": ["a", "b"], "stop_token_ids": [3]},
    {"prompt": [1, 2, 3], **PENALTIES, "min_tokens": 2, "ignore_eos": True},
    {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "x"},
    {"messages": MESSAGES, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2},
    {"messages": MESSAGES, "response_format": SCHEMA},
    {"messages": MESSAGES[:1], "chat_template_kwargs": {"style": "x"}},
    {"prompt": "a", "response_format": {"type": "regex", "regex": "a+"}, "tree_width": 2},
]


def read_body(url: str, data: bytes) -> APIRequest:
    """Read a request. Raises ValueError with the message that a client receives."""
    try:
        return read_request(model(), url, read_json(data))
    except HTTPError as error:
        message = error.body(url)["error"]["message"]
        raise (ValueError if error.status_code == 400 else AssertionError)(message) from None


def bodies(data: bytes) -> None:
    for url in (COMPLETIONS, CHAT):
        request = answer(read_body, url, data)
        assert request is None or all(0 < len(ids) < WINDOW for ids in request.prompts)


# ---- schemas: a `response_format` compiles and constrains an output, or gives an error message -----------

SECONDS = 5.0  # limit
CHILDREN = {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3}
TREE = {"type": "object", "properties": {"c": CHILDREN}}
SCHEMAS: list[Json] = [
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "x.*y"}}, "required": ["a"]},
    {"$defs": {"n": TREE}, "$ref": "#/$defs/n"},
    {"allOf": [{"type": "string", "pattern": f"x{i}.*"} for i in range(3)]},
    {"anyOf": [{"type": "integer", "minimum": 3, "multipleOf": 7}, {"const": "a"}, {"enum": [1, None, "b"]}]},
    {"type": "string", "format": "date-time", "minLength": 3, "maxLength": 40},
    {"type": "object", "patternProperties": {"^a": {"type": "number"}}, "additionalProperties": False},
]
FORMATS: list[Json] = [
    *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS),
    {"type": "regex", "regex": r"(a|b)*[c-e]{2,5}\d\s?"},
    {"type": "choice", "choice": ["red", "green"]},
    {"type": "grammar", "grammar": 'start: "a" b*\nb: "c" | /d+/ | "(" start ")"'},
    {"type": "grammar", "grammar": 'root ::= "a" [b-d]+ root?'},
    {"type": "json_object"},
]


def schemas(data: bytes) -> None:
    start = time.perf_counter()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    answer(follow, value)
    assert time.perf_counter() - start < SECONDS


def follow(value: Any) -> None:
    """Compile a `response_format` and advance by a few allowed tokens."""
    params, llm = SamplingParams(response_format=value), model()
    llm.engine.check_params(params)
    if (response_format := validate(value)) is None:
        return
    guide: Guide = llm.grammars.guide(response_format)
    for _ in range(8):
        mask = guide.plan([1, 2], 2, 1, 4).masks[0]
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        if not allowed or guide.ended or guide.error:
            break
        guide.advance(allowed[-1:])


TARGETS = {
    "bodies": Target(lambda: encoded(BODIES), bodies, mutate_json),
    "schemas": Target(lambda: encoded(FORMATS), schemas, mutate_json),
}
