"""OpenAI's batch format, lines and results (platform.openai.com/docs/guides/batch), as far as text goes.

A request that needs what is not there (tools) is refused; nothing is dropped but `IGNORED`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..outputs import Completion, RequestOutput
    from ..request import Logprob
    from .batch_lines import Task

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RENAMED = {"max_completion_tokens": "max_tokens"}
IGNORED = frozenset(  # they change no text; the model is the one that is loaded
    ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
ONLY: dict[str, tuple[Any, ...]] = {  # what is not there, and the values that do not ask for it
    "stream": (False,),
    "stream_options": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}


def from_openai(line: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(url, request in our words) of a line. Raises ValueError for what is not there."""
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in (CHAT, COMPLETIONS) or line.get("method", "POST") != "POST":
        raise ValueError(f'"url" must be "{CHAT}" or "{COMPLETIONS}" and "method" "POST", not {url!r}.')
    if not isinstance(body, dict):
        raise ValueError('"body" must be a JSON object, as is sent to the "url".')
    if unknown := sorted(line.keys() - {"custom_id", "id", "method", "url", "body"}):
        raise ValueError(f'unknown field {unknown[0]!r}; what is asked stands in "body".')
    request: dict[str, Any] = {}
    for theirs, ours in RENAMED.items():
        if body.get(theirs) is not None and body.get(ours) not in (None, body[theirs]):
            raise ValueError(f'"body" has both "{ours}" and "{theirs}", two words for one; give one of them.')
    for name, value in body.items():
        if name in ONLY and value is not None and value not in ONLY[name]:
            raise ValueError(f'"{name}" in "body" asks for what nanospec does not do: {value!r}.')
        if value is not None and name not in IGNORED and name not in ONLY:
            request[RENAMED.get(name) or name] = value
    if url == CHAT:
        request.update(_chat_logprobs(request))
        request["messages"] = [_flat(message) for message in _list(request.get("messages"))]
    elif isinstance(several := request.get("prompt"), list) and len(several) == 1:
        request["prompt"] = several if isinstance(several[0], int) else several[0]
    return url, request


def _list(messages: Any) -> list[Any]:
    if not isinstance(messages, list):
        raise ValueError('"body" needs "messages", a list.')
    return messages


def _chat_logprobs(request: dict[str, Any]) -> dict[str, int]:
    """Ours is the number of likeliest tokens, theirs a flag and that number."""
    wanted, top = request.pop("logprobs", False), request.pop("top_logprobs", 0)
    if not isinstance(wanted, bool) or (top and not wanted):
        raise ValueError('"logprobs" must be true or false in a chat, and true with "top_logprobs".')
    return {"logprobs": top} if wanted else {}


def _flat(message: Any) -> Any:
    """A message whose content is a text, also if it was given in parts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    if other := [part for part in parts if not _is_text(part)]:
        raise ValueError(f"{other[0]!r} in a message is no text, and nanospec reads texts only.")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def to_openai(task: Task, output: RequestOutput, model: str) -> dict[str, Any]:
    """The line of a finished request."""
    error = next((done.error for done in output.outputs if done.error), None)
    choices = [_choice(task, done) for done in output.outputs]
    sizes = len(output.prompt_token_ids), sum(len(done.token_ids) for done in output.outputs)
    body = {
        "id": output.request_id,
        "object": "chat.completion" if task.url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*sizes, sum(sizes)))),
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {
        "id": f"batch_req_{task.key}",
        "custom_id": (task.names or {}).get("custom_id"),
        "response": None if error else response,
        "error": {"code": "engine_error", "message": error} if error else None,
    }


def _choice(task: Task, done: Completion) -> dict[str, Any]:
    number = task.params.logprobs
    if task.url == CHAT:
        text: dict[str, Any] = {"message": {"role": "assistant", "content": done.text}}
    else:
        text = {"text": done.text}
    logprobs = None if number is None else _logprobs(task.url, done, number)
    return {"index": done.index, **text, "logprobs": logprobs, "finish_reason": done.finish_reason}


def _logprobs(url: str, done: Completion, number: int) -> dict[str, Any]:
    """Of each of the output's own tokens, and the `number` likeliest."""

    def entry(found: Logprob) -> dict[str, Any]:
        text = found.decoded_token or ""
        return {"token": text, "logprob": found.logprob, "bytes": list(text.encode())}

    own, top = [], []
    for token, at in zip(done.token_ids, done.logprobs or (), strict=True):
        own.append(entry(at[token]))
        likeliest = [found for found in at.values() if found.rank <= number]
        top.append(list(map(entry, sorted(likeliest, key=lambda found: found.rank))))
    if url == CHAT:
        return {"content": [{**place, "top_logprobs": best} for place, best in zip(own, top)]}
    return {
        "tokens": [place["token"] for place in own],
        "token_logprobs": [place["logprob"] for place in own],
        "top_logprobs": [{each["token"]: each["logprob"] for each in best} for best in top],
    }
