"""Parse and validate requests before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...config import SamplingParams
from ...llm import LLM
from ...text.validation import shown
from ..json_input import strict_json
from ..openai_format import CHAT, IGNORED, MAX_MESSAGES, translate_request
from ..tasks import encode, parse_task
from ..tool_calls.offer import FIELDS
from ..tool_calls.parser import CallParser
from .gate import HTTPError

MAX_STOP, MAX_STOP_LENGTH = 16, 256  # strings, characters of each
MAX_LOGIT_BIAS = 1024  # tokens
STREAM_OPTIONS = ("include_usage", "include_drafts", "include_obfuscation", "continuous_usage_stats")
SERVER_FIELDS: dict[str, Any] = {"stream": False, "stream_options": {}, "cache_salt": ""}
# Fields of a request besides those of `SamplingParams`.
KNOWN = (*SERVER_FIELDS, *IGNORED, *FIELDS, "max_completion_tokens", "top_logprobs")


@dataclass
class APIRequest:
    """A validated request."""

    url: str  # of `app.FORMATS`
    prompts: list[list[int]]  # token ids
    params: SamplingParams
    streams: bool
    include: frozenset[str]  # of `STREAM_OPTIONS`
    salt: bytes  # the request's cache_salt; requests with different salts share no cached prefixes
    parser: Callable[[], CallParser] | None = None  # of tool calls, if the request offers tools
    body: Mapping[str, Any] = field(default_factory=dict)  # as received

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def read_json(data: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises HTTPError."""
    try:
        body = strict_json(data)
    except ValueError as error:
        raise HTTPError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise HTTPError(400, "The body must be a JSON object.")
    return body


def read_request(
    llm: LLM,
    url: str,
    received: Mapping[str, Any],
    translate: Callable[[Mapping[str, Any]], Any] | None = None,
) -> APIRequest:
    """Parse and validate a completion, a chat completion, or the request of another API, which `translate`
    converts to a chat completion. Too slow for the event loop. Raises HTTPError."""
    try:
        api, body = (url, received) if translate is None else (CHAT, translate(received))
        fields = translate_request(api, {name: body[name] for name in body if name not in SERVER_FIELDS})
        defaults = replace(llm.default_params, max_tokens=None) if api == CHAT else llm.default_params
        prompt: Any = fields.get("prompt")  # one prompt, or a list of strings or of lists of token ids
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        if is_list and len(prompt) > MAX_MESSAGES:
            raise ValueError(f"prompt has {len(prompt)} entries, but the limit is {MAX_MESSAGES}.")
        requests = [{**fields, "prompt": each} for each in prompt] if is_list else [fields]
        tasks = [parse_task(each, defaults, raw=True, known=KNOWN) for each in requests]
        params = tasks[0].params
        if len(params.stop) > MAX_STOP or any(len(stop) > MAX_STOP_LENGTH for stop in params.stop):
            raise ValueError(f"stop is limited to {MAX_STOP} strings of {MAX_STOP_LENGTH} characters.")
        if (count := len(params.logit_bias)) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {count} tokens, but the limit is {MAX_LOGIT_BIAS}.")
        window, served = llm.engine.max_model_len, _read_server_fields(body)
        prompts = [encode(task, llm.tokenizer, window) for task in tasks]
        request = APIRequest(url, prompts, tasks[0].params, *served, tasks[0].parser, received)
        request.params = llm.engine.check_params(request.params)
        for ids in prompts:
            llm.engine.limits.check_prompt(ids)
    except (ValueError, TypeError, RecursionError) as error:
        raise bad_request(error, received) from None
    return request


def bad_request(error: Exception, body: Mapping[str, Any]) -> HTTPError:
    """Return the error response for a body. Its `param` is the first field of the body that `error` names."""
    message = str(error)
    if "response_format" not in body and "tools" in body:  # the error of a grammar for calls
        message = message.replace("response_format", "tools")
    named = re.match(r"unknown field '([^']*)'", message)
    words = [named[1]] if named else re.findall(r"[A-Za-z_]+", message)
    param = next((word for word in words if word in body), "")
    return HTTPError(400, message, param, "unknown_field" if named else "")


def _read_server_fields(body: Mapping[str, Any]) -> tuple[bool, frozenset[str], bytes]:
    streams, options, salt = (body.get(name) or empty for name, empty in SERVER_FIELDS.items())
    if not isinstance(streams, bool):
        raise ValueError(f"stream={shown(streams)} must be true or false.")
    if not isinstance(options, dict) or (options and not streams):
        raise ValueError("stream_options must be an object, and requires stream=true.")
    if wrong := [n for n, value in options.items() if n not in STREAM_OPTIONS or not isinstance(value, bool)]:
        known = ", ".join(STREAM_OPTIONS)
        raise ValueError(f"stream_options: {shown(wrong[0])} is unknown or not a boolean; use {known}.")
    if not isinstance(salt, str) or len(salt) > 256:
        raise ValueError("cache_salt must be a string of at most 256 characters.")
    include = frozenset(name for name, value in options.items() if value)
    return streams, include, salt.encode("utf-8", "surrogatepass")
