"""OpenAI's Responses API (platform.openai.com/docs/api-reference/responses), without stored responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from ...outputs import Completion
from ...text import shown
from ..openai_format import usage
from ..tool_calls import CallArguments, CallStart
from .answers import Format, event
from .gate import HTTPError
from .jobs import Delta
from .translation import Conversation, nonempty_list, required, shared_fields, text_of, tool_fields

RESPONSES = "/v1/responses"
UNSUPPORTED = {  # field -> what to do instead
    "previous_response_id": "send the whole conversation as input", "background": "use stream",
    "conversation": "send the whole conversation as input", "prompt": "use instructions and input",
    "top_logprobs": "use /v1/chat/completions",
}  # fmt: skip
FIELDS = {
    *UNSUPPORTED, "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice",
    "parallel_tool_calls",
    # These do not affect the output of a model without hidden reasoning, or only select a service.
    "include", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store", "stream_options",
    "truncation", "user",
}  # fmt: skip
TEXT = ("input_text", "output_text", "text")
TOOL_CHOICES = {name: name for name in ("auto", "required", "none", "function")}
ECHOED: dict[str, Any] = {  # fields of the request that are part of the response, with their defaults
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "reasoning": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
    "truncation": "disabled", "user": None,
}  # fmt: skip


def translate(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion of a request for a response. Raises ValueError."""
    chat, messages = shared_fields(body, FIELDS), Conversation()
    for name, advice in UNSUPPORTED.items():
        if body.get(name):
            raise ValueError(f"{name} is not supported; {advice}.")
    if instructions := body.get("instructions"):
        messages.add("system", text_of(instructions, ()))
    if isinstance(body.get("input"), str):
        messages.add("user", body["input"])
    else:
        for item in nonempty_list(body, "input"):
            _translate_item(item, messages)
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    chat |= {"parallel_tool_calls": body.get("parallel_tool_calls")}
    chat |= tool_fields(body, "parameters", ("function",), TOOL_CHOICES)
    text = required({"text": body.get("text") or {}}, "text", dict)
    format = required({"format": text.get("format") or {}}, "format", dict)
    if format.get("type") == "json_schema":
        schema = {name: value for name, value in format.items() if name != "type"}
        format = {"type": "json_schema", "json_schema": schema}
    return {**chat, "response_format": format or None}


def _translate_item(item: Any, messages: Conversation) -> None:
    """Append an input item to `messages`."""
    match (item.get("type") or "message") if isinstance(item, dict) else item:
        case "message":
            messages.add(required(item, "role"), text_of(item.get("content"), TEXT))
        case "function_call":
            messages.add_call(*(required(item, name) for name in ("call_id", "name", "arguments")))
        case "function_call_output":
            messages.add_result(required(item, "call_id"), text_of(item.get("output"), TEXT))
        case "reasoning":
            pass
        case kind:
            raise ValueError(f'"input" contains {shown(kind)}, but only text and functions are supported.')


class ResponsesFormat(Format):
    """The format of responses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._created, self._sequence = int(time.time()), count()
        self._items: list[dict[str, Any]] = []  # of the output, so far

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        self.pass_whole(done[0])
        return self._response(_status(done), done)

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def update(self, delta: Delta) -> Iterator[bytes]:
        for part in self.parts(delta):
            if isinstance(part, CallStart):
                call = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
                yield from self._open("fc", call)
            elif isinstance(part, CallArguments):
                self._items[-1]["arguments"] += part.text
                yield self._item_event("function_call_arguments.delta", delta=part.text)
            else:
                if not self._items or self._items[-1]["type"] != "message":
                    yield from self._open("msg", {"type": "message", "role": "assistant", "content": []})
                    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    self._items[-1]["content"].append(content)
                    yield self._item_event("content_part.added", content_index=0, part=content)
                self._items[-1]["content"][0]["text"] += part.text
                yield self._item_event("output_text.delta", content_index=0, delta=part.text, logprobs=[])

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        yield from self._close(status := _status(done))
        yield self._event(status, response=self._response(status, done))

    def failed(self, error: HTTPError) -> bytes:
        details = {"code": "server_error", "message": error.detail}
        return self._event("failed", response={**self._response("failed"), "error": details})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(self._sequence), **fields})

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last item."""
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **where, **fields)

    def _open(self, prefix: str, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close("completed")
        item_id = f"{prefix}_{self.request_id}_{len(self._items)}"
        self._items.append({"id": item_id, "status": "in_progress", **item})
        yield self._item_event("output_item.added", item=self._items[-1])

    def _close(self, status: str) -> Iterator[bytes]:
        """End the last item, if there is one."""
        for item in self._items[-1:]:
            item["status"] = status
            if item["type"] == "message":
                [part] = item["content"]
                yield self._item_event("output_text.done", content_index=0, text=part["text"], logprobs=[])
                yield self._item_event("content_part.done", content_index=0, part=part)
            else:
                arguments = {"name": item["name"], "arguments": item["arguments"]}
                yield self._item_event("function_call_arguments.done", **arguments)
            yield self._item_event("output_item.done", item=item)

    def _response(self, status: str, done: Sequence[Completion] = ()) -> dict[str, Any]:
        body, params = self.request.body, self.request.params
        echoed = {n: default if body.get(n) is None else body[n] for n, default in ECHOED.items()}
        return {
            "id": f"resp_{self.request_id}", "object": "response", "created_at": self._created,
            "status": status, "error": None, "model": self.model, "output": self._items, **echoed,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "temperature": params.temperature, "top_p": params.top_p, "previous_response_id": None,
            "store": False, "background": False, "usage": self._usage(done) if done else None,
        }  # fmt: skip

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        counts = usage(self.request.num_prompt_tokens, done, 1)
        return {
            "input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": counts["total_tokens"],
            "speculation": counts["speculation"],
        }  # fmt: skip


def _status(done: Sequence[Completion]) -> str:
    return "incomplete" if done[0].finish_reason == "length" else "completed"
