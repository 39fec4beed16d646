"""What a client asks, read and checked before anything runs."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import SamplingParams
from ...llm import LLM
from ...text.checks import shown
from ...text.prompts import check_length, encode
from ...text.strict_json import plain
from ..cli.batch_lines import ask
from .errors import HTTPError, bad_request
from .openai_format import CHAT, IGNORED, RENAMED, in_our_words
from .settings import ServeConfig

MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_MESSAGES = 4096
OWN = ("stream", "stream_options", "chat_template_kwargs", "cache_salt")  # of the server, not of a request
KNOWN = (*OWN, *RENAMED, *IGNORED, "top_logprobs")  # beside those of `SamplingParams`
NOT_IN_TEMPLATES = {"self", "chat_template", "chat_template_kwargs", "messages", "tools", "documents"}


@dataclass
class Asked:
    """A request.

    Attributes:
        url: `CHAT` or `COMPLETIONS`.
        prompts: token ids, one list for each prompt.
        streams, with_usage, with_counts, with_drafts: what is sent as it comes.
        salt: the client's own part of who may share cached prefixes.
    """

    url: str
    prompts: list[list[int]]
    params: SamplingParams
    streams: bool = False
    with_usage: bool = False
    with_counts: bool = False
    with_drafts: bool = False
    salt: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises HTTPError."""
    try:
        body = plain(data.removeprefix(BOM_UTF8))
    except ValueError as error:
        raise HTTPError(400, f"The body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise HTTPError(400, "The body must be a JSON object.")
    return body


def read_request(llm: LLM, config: ServeConfig, url: str, body: Mapping[str, Any]) -> Asked:
    """A request of one of the two kinds. May take long: not for the event loop. Raises HTTPError."""
    try:
        own = {name: body[name] for name in OWN if body.get(name) is not None}
        rest = in_our_words(url, {name: value for name, value in body.items() if name not in OWN})
        if url != CHAT and "chat_template_kwargs" in own:
            raise ValueError("chat_template_kwargs is for chats, and this is none.")
        base = SamplingParams(max_tokens=None) if url == CHAT else SamplingParams()
        several = [{**rest, **each} for each in _prompts(rest, config.max_prompts)]
        tasks = [ask(each, base, known=KNOWN) for each in several]
        params = tasks[0].params
        _check_limits(params, config)
        found = Asked(url, [], params, **_streaming(own), salt=_salt(own))
        for task in tasks:
            if task.messages is not None:
                ids = chat_prompt(llm, task.messages, own.get("chat_template_kwargs", {}))
            else:
                text, window = task.prompt, llm.engine.max_model_len
                ids = encode(llm.tokenizer, text, window) if isinstance(text, str) else text or []
            llm.engine.check(ids, params)
            found.prompts.append(ids)
    except (ValueError, TypeError, RecursionError) as error:
        raise bad_request(ValueError(error), body) from None
    return found


def chat_prompt(llm: LLM, messages: list[dict[str, Any]], options: Any) -> list[int]:
    """The token ids of a conversation, by the model's own template."""
    if not isinstance(options, dict):
        raise ValueError("chat_template_kwargs must be an object.")
    if taken := sorted(options.keys() & NOT_IN_TEMPLATES):
        raise ValueError(f"chat_template_kwargs must be an object without {shown(taken[0])}.")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages are {len(messages)}, but the limit is {MAX_MESSAGES}.")
    length = sum(len(message["content"]) for message in messages)
    check_length(llm.tokenizer, length, llm.engine.max_model_len)
    return llm.chat_prompt(messages, **options)


def _prompts(request: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """The prompts of a completion, each as a field: one, or a list of texts or of lists of ids."""
    given = request.get("prompt")
    if not isinstance(given, list) or not given or isinstance(given[0], int):
        return [{}]
    if len(given) > most:
        raise ValueError(f"prompt holds {len(given)} prompts, but the limit is {most}.")
    return [{"prompt": prompt} for prompt in given]


def _check_limits(params: SamplingParams, config: ServeConfig) -> None:
    if params.n > config.max_n:
        raise ValueError(f"n={params.n} is above the limit of {config.max_n}.")
    if len(params.stop) > config.max_stop or any(len(stop) > MAX_STOP_LENGTH for stop in params.stop):
        raise ValueError(f"stop may hold {config.max_stop} strings of {MAX_STOP_LENGTH} characters at most.")
    if len(params.logit_bias) > config.max_logit_bias:
        count, most = len(params.logit_bias), config.max_logit_bias
        raise ValueError(f"logit_bias names {count} tokens, but the limit is {most}.")


def _streaming(own: Mapping[str, Any]) -> dict[str, bool]:
    streams, options = own.get("stream", False), own.get("stream_options", {})
    if not isinstance(streams, bool):
        raise ValueError(f"stream={shown(streams)} must be true or false.")
    if not isinstance(options, dict) or (options and not streams):
        raise ValueError("stream_options must be an object, and needs stream=true.")
    known = {"include_usage", "include_drafts", "include_obfuscation", "continuous_usage_stats"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"stream_options holds the unknown field {shown(unknown[0])}.")
    if wrong := [name for name, value in options.items() if not isinstance(value, bool)]:
        raise ValueError(f"stream_options: {wrong[0]} must be true or false.")
    usage, drafts = options.get("include_usage", False), options.get("include_drafts", False)
    counts = usage and options.get("continuous_usage_stats", False)  # as vLLM has it
    return {"streams": streams, "with_usage": usage, "with_counts": counts, "with_drafts": drafts}


def _salt(own: Mapping[str, Any]) -> bytes:
    salt = own.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > 256:
        raise ValueError("cache_salt must be a text of at most 256 characters.")
    return salt.encode("utf-8", "surrogatepass")
