"""OpenAI's Responses API (platform.openai.com/docs/api-reference/responses), without stored responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from ...outputs import Completion
from ...text.validation import shown
from ..openai_format import text_of, usage
from ..tool_calls.parser import Part
from .answers import event
from .gate import HTTPError
from .translation import Conversation, ItemFormat, required, shared_fields, tool_fields

RESPONSES = "/v1/responses"
UNSUPPORTED = ("previous_response_id", "conversation", "background", "prompt")  # need stored responses
FIELDS = (
    *UNSUPPORTED, "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice",
    "parallel_tool_calls",
    # These do not affect the output of a model without hidden reasoning.
    "include", "max_tool_calls", "reasoning", "stream_options", "truncation",
)  # fmt: skip
TEXT = ("input_text", "output_text", "text")
TOOL_CHOICES = {name: name for name in ("auto", "required", "none", "function")}
REPEATED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}  # in the response, with defaults
TEXT_EVENT = {"content_index": 0, "logprobs": []}


def translate(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion of a request for a response. Raises ValueError."""
    chat, messages = shared_fields(body, FIELDS), Conversation()
    if name := next(filter(body.get, UNSUPPORTED), None):
        raise ValueError(f"{name} requires stored responses; send the whole conversation as input instead.")
    if instructions := body.get("instructions"):
        messages.add("system", text_of("instructions", instructions))
    if isinstance(body.get("input"), str):
        messages.add("user", body["input"])
    else:
        for item in required(body, "input", list):
            _translate_item(item, messages)
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    chat |= {"parallel_tool_calls": body.get("parallel_tool_calls")}
    chat |= tool_fields(body, "parameters", ("function",), TOOL_CHOICES)
    format = required(body, "text", dict).get("format") if body.get("text") else None
    if isinstance(format, dict) and format.get("type") == "json_schema":
        schema = {name: value for name, value in format.items() if name != "type"}
        format = {"type": "json_schema", "json_schema": schema}
    return {**chat, "response_format": format}


def _translate_item(item: Any, messages: Conversation) -> None:
    """Append an input item to `messages`."""
    match (item.get("type") or "message") if isinstance(item, dict) else item:
        case "message":
            messages.add(required(item, "role"), text_of("content", item.get("content"), TEXT))
        case "function_call":
            messages.add_call(*(required(item, name) for name in ("call_id", "name", "arguments")))
        case "function_call_output":
            text = text_of("output", item.get("output"), TEXT)
            messages.append({"role": "tool", "tool_call_id": required(item, "call_id"), "content": text})
        case "reasoning":
            pass
        case kind:
            raise ValueError(f'"input" contains {shown(kind)}, but only text and functions are supported.')


class ResponsesFormat(ItemFormat):
    """The format of responses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._created, self._sequence = int(time.time()), count()

    def begin(self) -> Iterator[bytes]:
        for status in ("created", "in_progress"):
            yield self._event(status, response=self._with_status("in_progress"))

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        yield from self._close(status := _status(done))
        yield self._event(status, response=self._response(done))

    def failed(self, error: HTTPError) -> bytes:
        details = {"code": "server_error", "message": error.detail}
        return self._event("failed", response={**self._with_status("failed"), "error": details})

    def _open(self, part: Part) -> Iterator[bytes]:
        prefix, item = "msg", {"type": "message", "role": "assistant", "content": []}
        if part.name:
            prefix = "fc"
            item = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
        item_id = f"{prefix}_{self.request_id}_{len(self._items)}"
        self._items.append({"id": item_id, "status": "in_progress", **item})
        yield self._item_event("output_item.added", item=self._items[-1])
        if not part.name:
            yield self._item_event("content_part.added", content_index=0, part=_content(""))

    def _extend(self, text: str) -> bytes:
        if self._is_text:
            return self._item_event("output_text.delta", delta=text, **TEXT_EVENT)
        return self._item_event("function_call_arguments.delta", delta=text)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        for item in self._items[-1:]:
            item["status"] = status
            if self._is_text:
                item["content"] = [part := _content(self._text)]
                yield self._item_event("output_text.done", text=self._text, **TEXT_EVENT)
                yield self._item_event("content_part.done", content_index=0, part=part)
            else:
                item["arguments"] = self._text
                arguments = {"name": item["name"], "arguments": self._text}
                yield self._item_event("function_call_arguments.done", **arguments)
            yield self._item_event("output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(self._sequence), **fields})

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last item."""
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **where, **fields)

    def _with_status(self, status: str) -> dict[str, Any]:
        """Return a response without its usage."""
        body = self.request.body
        return {
            "id": f"resp_{self.request_id}", "object": "response", "created_at": self._created,
            "status": status, "error": None, "model": self.model, "output": self._items,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{n: default if body.get(n) is None else body[n] for n, default in REPEATED.items()},
        }  # fmt: skip

    def _response(self, done: Sequence[Completion]) -> dict[str, Any]:
        counts = usage(self.request.num_prompt_tokens, done, 1)
        counted = {
            "input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": counts["total_tokens"],
            "speculation": counts["speculation"],
        }  # fmt: skip
        return {**self._with_status(_status(done)), "usage": counted}


def _content(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Sequence[Completion]) -> str:
    return "incomplete" if done[0].finish_reason == "length" else "completed"
