"""Fuzz request bodies: the server must return a valid request or an error message."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanospec.apps.openai_format import CHAT, COMPLETIONS
from nanospec.apps.serve.gate import HTTPError
from nanospec.apps.serve.requests import APIRequest, read_json, read_request
from nanospec.config import EngineConfig, SamplingParams
from nanospec.engine.request import Limits
from nanospec.extras.grammar.grammar import Grammars
from nanospec.llm import LLM
from nanospec.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

from .mutation import mutate_json as mutate  # noqa: F401
from .refusal import answer

WINDOW, VOCAB = 64, 300
PARTS = [{"type": "text", "text": "a"}]
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PARTS}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}
NUMBERS = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "n": 2, "logprobs": 3}
PENALTIES = {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 3}}
BODIES: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 3, **NUMBERS, "stop": ["a", "b"], "stop_token_ids": [3]},
    {"prompt": [1, 2, 3], **PENALTIES, "min_tokens": 2, "ignore_eos": True},
    {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "x"},
    {"messages": MESSAGES, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2},
    {"messages": MESSAGES, "response_format": SCHEMA},
    {"messages": MESSAGES[:1], "chat_template_kwargs": {"style": "x"}},
    {"prompt": "a", "response_format": {"type": "regex", "regex": "a+"}, "tree_width": 2},
]
SEEDS = [json.dumps(body).encode() for body in BODIES]


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


def one(data: bytes) -> None:
    for url in (COMPLETIONS, CHAT):
        request = answer(read, url, data)
        assert request is None or all(0 < len(ids) < WINDOW for ids in request.prompts)


def read(url: str, data: bytes) -> APIRequest:
    """Read a request. Raises ValueError with the message that a client receives."""
    try:
        return read_request(model(), url, read_json(data))
    except HTTPError as error:
        message = error.body(url)["error"]["message"]
        raise (ValueError if error.status_code == 400 else AssertionError)(as_statement(message)) from None


def as_statement(text: str) -> str:
    """Replace a final question mark ("did you mean ...?") by a period."""
    return text.removesuffix("?") + "." if text.endswith("?") else text
