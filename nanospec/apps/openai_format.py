"""OpenAI's request and response formats (platform.openai.com/docs/api-reference), text only.

Used by the server and by batches. A request that needs an unsupported feature (images, audio) is rejected.
Clients send fields that have no effect here: those in `IGNORED`, and those for a chat template that does not
use them (`text.chat.OPTIONAL`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from ..outputs import Completion, Logprob, Piece, SpecStats
from ..text.validation import shown
from .tool_calls.offer import FIELDS, read_calls, read_tools
from .tool_calls.parser import CallParser, parse

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_MESSAGES = 4096
IGNORED = frozenset({  # these do not affect the output; only one model is loaded
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options",
})  # fmt: skip
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> accepted values, those that do not use the feature
    "stream": (False,), "stream_options": (), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "audio": (), "web_search_options": (), "moderation": (),
}  # fmt: skip
INSTEAD = {
    "echo": "; prepend the prompt to the text yourself", "best_of": "; use n",
    "suffix": "; put both parts into the prompt, in the model's format for fill-in-the-middle",
    "functions": "; use tools", "function_call": "; use tool_choice",
}  # fmt: skip
# GPT-2's byte-level alphabet: printable bytes stand for themselves, other bytes are mapped to 256 and above.
LETTERS = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = [byte for byte in range(256) if byte not in LETTERS]
BYTES = {chr(byte): byte for byte in LETTERS} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def translate_request(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an OpenAI request body to the fields of `SamplingParams` and "messages" or "prompt". Raises
    ValueError or TypeError for unsupported features."""
    request: dict[str, Any] = {}
    limit, old = body.get("max_completion_tokens"), body.get("max_tokens")
    if None not in (limit, old) and limit != old:
        raise ValueError('"max_completion_tokens" and "max_tokens" differ; set only one of them.')
    for name, value in body.items():
        if value is None or name in IGNORED or (name in UNSUPPORTED and value in UNSUPPORTED[name]):
            continue
        if name in UNSUPPORTED:
            quoted = f"={shown(value)}" if isinstance(value, str | int | float) else ""
            raise ValueError(f"{name}{quoted} is not supported{INSTEAD.get(name, '')}.")
        if name not in FIELDS:
            request["max_tokens" if name == "max_completion_tokens" else name] = value
    if (tools := read_tools(body)) is not None:
        if url != CHAT:
            raise ValueError(f"tools are only supported by {CHAT}.")
        request["tools"] = tools
    if "prediction" in request:
        request["prediction"] = _prediction(request["prediction"])
    if url == CHAT:
        request.update(_chat_logprobs(request))
        request["messages"] = normalize_messages(request.get("messages"))
    elif "messages" in request:
        raise ValueError(f'"messages" is only supported by {CHAT}.')
    elif isinstance(prompts := request.get("prompt"), list) and len(prompts) == 1:
        request["prompt"] = prompts if isinstance(prompts[0], int) else prompts[0]
    return request


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages with string contents: text parts are joined, and null becomes an empty string. Raises
    ValueError for invalid messages."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a non-empty list of {"role": ..., "content": ...} objects.')
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages has {len(messages)} entries, but the limit is {MAX_MESSAGES}.")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not {"content", "tool_calls"} & message.keys():
        raise ValueError(f'"messages" contains {shown(message)}, but each needs a "role" and a "content".')
    calls, content = message.get("tool_calls"), message.get("content")
    message = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    if calls:
        message["tool_calls"] = read_calls(calls)
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ValueError(f'"messages" contains {shown(message)}, but the role tool needs a "tool_call_id".')
    return {**message, "content": text_of("messages", content or "")}


def text_of(field: str, parts: Any, kinds: Collection[str] = ("text",), separator: str = "") -> str:
    """Return a content: a string, or a list of parts whose types are in `kinds`. Raises ValueError that names
    the field."""
    if isinstance(parts, str):
        return parts
    texts = list[str]()
    for part in parts if isinstance(parts, list) else [parts]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        if not isinstance(text, str):
            raise ValueError(f'"{field}" contains {shown(part)}, but only text content is supported.')
        texts.append(text)
    return separator.join(texts)


def _prediction(value: Any) -> str:
    """Return the text of a `prediction`. Raises ValueError."""
    if not isinstance(value, dict) or value.get("type") != "content" or "content" not in value:
        example = '{"type": "content", "content": "..."}'
        raise ValueError(f'"prediction" must be an object such as {example}, not {shown(value)}.')
    return text_of("prediction", value["content"])


def _chat_logprobs(request: dict[str, Any]) -> dict[str, int]:
    """Convert OpenAI's `logprobs` flag and `top_logprobs` to the number of top log-probabilities."""
    enabled, top = request.pop("logprobs", False), request.pop("top_logprobs", 0)
    if not isinstance(enabled, bool) or (top and not enabled):
        raise ValueError('"logprobs" must be true or false, and "top_logprobs" requires it to be true.')
    return {"logprobs": top} if enabled else {}


def response_header(url: str, request_id: str, model: str, chunk: bool = False) -> dict[str, Any]:
    """Return the first fields of a response, or of a stream event if `chunk` is set."""
    kind = "chat.completion" + ".chunk" * chunk if url == CHAT else "text_completion"
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def choice(
    url: str, done: Completion, number: int | None, tokenizer: Tokenizer,
    new_parser: Callable[[], CallParser] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return an output as a choice with the `number` top log-probabilities per token (None: no logprobs), and
    the tool calls that a parser finds, if there is one."""
    content: dict[str, Any] = {"text": done.text}
    text, calls = parse(done.text, new_parser)
    if url == CHAT:
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        content = {"message": {**message, "tool_calls": calls} if calls else message}
    positions = (done.logprobs or [])[: done.num_text_tokens]
    entries = logprobs(url, positions, done.pieces, number, tokenizer)
    return {"index": done.index, **content, "logprobs": entries, **finish_reasons(done, len(calls))}


def finish_reasons(done: Completion | None, num_calls: int) -> dict[str, Any]:
    """Return why an output ended; null while it has not. An output with tool calls ends with "tool_calls",
    unless a stop string or the length limit may have cut off the last one."""
    reason = done and done.finish_reason
    if done and num_calls and reason == "stop" and not isinstance(done.stop_reason, str):
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": done and done.stop_reason}


def logprobs(
    url: str, positions: Sequence[Mapping[int, Logprob]], pieces: Sequence[Piece], number: int | None,
    tokenizer: Tokenizer, offset: int = 0,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the log-probabilities of the sampled tokens, first in each of `positions`, and of the `number`
    most likely ones; None if `number` is None. `pieces` are the tokens' texts, which start at `offset`."""
    if number is None:
        return None

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": logprob.logprob, "bytes": list(token_bytes(tokenizer, token, text))}

    chosen, top = [], []
    for position in positions:
        chosen.append(entry(*next(iter(position.items()))))
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        top.append([entry(*item) for item in ranked if item[1].rank <= number])
    if url == CHAT:
        return {"content": [{**token, "top_logprobs": best} for token, best in zip(chosen, top)]}
    offsets = accumulate((len(piece.text) for piece in pieces), initial=offset)
    return {
        "tokens": [token["token"] for token in chosen],
        "token_logprobs": [token["logprob"] for token in chosen],
        "top_logprobs": [{t["token"]: t["logprob"] for t in best} for best in top] if number else None,
        "text_offset": list(islice(offsets, len(chosen))),
    }


def token_bytes(tokenizer: Tokenizer, token: int, text: str) -> bytes:
    """Return the bytes of a token, even if they are only part of a character; `text` is its decoded text."""
    if "\ufffd" in text:
        raw = tokenizer.backend.id_to_token(token) or ""
        if token in tokenizer.byte_token_ids:
            return bytes.fromhex(raw[3:5])
        if all(letter in BYTES for letter in raw):
            return bytes(BYTES[letter] for letter in raw)
    return text.encode()


def usage(num_prompt: int, outputs: Sequence[Completion], n: int) -> dict[str, Any]:
    """Return token counts and speculation statistics (`speculation` is an extension of OpenAI's format). Each
    prompt has `n` outputs, and only the first one's prefix-cache hits count."""
    cached = sum(done.num_cached_tokens for done in outputs if done.index % n == 0)
    predicted = sum(done.num_prediction_tokens for done in outputs)
    accepted = sum(done.num_accepted_prediction_tokens for done in outputs)
    names = ("num_steps", "num_tokens", "num_drafted", "num_accepted")
    spec = SpecStats(**{name: sum(getattr(done.stats, name) for done in outputs) for name in names})
    reported = ("num_steps", "num_drafted", "num_accepted", "tokens_per_step", "acceptance_rate")
    return {
        **counts(num_prompt, sum(len(done.token_ids) for done in outputs)),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted - accepted, 0),
        },
        "speculation": {name: value for name, value in spec.to_dict().items() if name in reported},
    }


def counts(num_prompt: int, num_output: int) -> dict[str, int]:
    """Return the token counts of a usage object."""
    total = num_prompt + num_output
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": total}
