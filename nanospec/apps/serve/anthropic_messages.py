"""Anthropic's Messages API (platform.claude.com/docs/en/api/messages)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...outputs import Completion
from ...text.validation import shown
from ..openai_format import text_of, usage
from ..tool_calls.offer import read_object
from ..tool_calls.parser import Part
from .answers import event
from .translation import Conversation, ItemFormat, required, shared_fields, tool_fields

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
FIELDS = (
    "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "output_config",
    # These do not affect the output of a model without hidden reasoning, or only select a service.
    "thinking", "cache_control", "context_management", "diagnostics", "inference_geo", "speed",
)  # fmt: skip
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}
# Claude Code starts its system prompt with a line that changes between requests. It would be the end of the
# common prefix, so no request would find its prompt in the prefix cache.
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:.*\n*")


def translate(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion of a message request. Raises ValueError."""
    chat, messages = shared_fields(body, FIELDS), Conversation()
    if system := BILLING_HEADER.sub("", text_of("system", body.get("system") or "", separator="\n")):
        messages.add("system", system)
    for message in required(body, "messages", list):
        _translate_message(message, messages)
    chat |= {"messages": messages, "max_tokens": body.get("max_tokens"), "stop": body.get("stop_sequences")}
    chat |= tool_fields(body, "input_schema", (None, "custom"), TOOL_CHOICES)
    if isinstance(choice := body.get("tool_choice"), dict) and choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if isinstance(config := body.get("output_config"), dict) and config.get("format"):
        schema = {"name": "output", "schema": required(config["format"], "schema", dict)}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _translate_message(message: Any, messages: Conversation) -> None:
    """Append a message to `messages`. A tool result becomes a message of its own."""
    if (role := required(message, "role")) not in ("user", "assistant", "system"):
        raise ValueError(f'"messages" contains the role {shown(role)}; use "user", "assistant" or "system".')
    if isinstance(message.get("content"), str):
        messages.add(role, message["content"])
        return
    for block in required(message, "content", list):
        match role, isinstance(block, dict) and block.get("type"):
            case "assistant", "thinking" | "redacted_thinking":
                continue
            case "assistant", "tool_use":
                arguments = json.dumps(required(block, "input", dict), ensure_ascii=False)
                messages.add_call(required(block, "id"), required(block, "name"), arguments)
            case "user", "tool_result":
                result = text_of("content", block.get("content") or "", separator="\n")
                error = "Error: " if block.get("is_error") else ""
                call_id = required(block, "tool_use_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": error + result})
            case _:
                messages.add(role, text_of("content", [block]))


class AnthropicFormat(ItemFormat):
    """The format of messages. The items are the blocks of the content."""

    quiet = event({"type": "ping"})

    def begin(self) -> Iterator[bytes]:
        yield event({"type": "message_start", "message": self._message()})

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        yield from self._close()
        yield event({"type": "message_delta", "delta": self._stop(done[0]), "usage": self._usage(done)})
        yield event({"type": "message_stop"})

    def _open(self, part: Part) -> Iterator[bytes]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.name:
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        self._items.append(block)
        yield self._event("content_block_start", content_block=block)

    def _extend(self, text: str) -> bytes:
        kind, name = ("text_delta", "text") if self._is_text else ("input_json_delta", "partial_json")
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        for block in self._items[-1:]:
            # The arguments are empty if the output ended before they were complete.
            block |= {"text": self._text} if self._is_text else {"input": read_object(self._text) or {}}
            yield self._event("content_block_stop")

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last block."""
        return event({"type": kind, "index": len(self._items) - 1, **fields})

    def _response(self, done: Sequence[Completion]) -> dict[str, Any]:
        return {**self._message(), **self._stop(done[0]), "usage": self._usage(done)}

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self.model,
            "content": self._items, "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": self.request.num_prompt_tokens, "output_tokens": 0},
        }  # fmt: skip

    def _stop(self, done: Completion) -> dict[str, Any]:
        """Return why the output ended."""
        sequence = done.stop_reason if isinstance(done.stop_reason, str) else None
        calls = any(block["type"] == "tool_use" for block in self._items)
        reason = "max_tokens" if done.finish_reason == "length" else "tool_use" if calls else "end_turn"
        return {"stop_reason": reason if sequence is None else "stop_sequence", "stop_sequence": sequence}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the token counts. In this API, input tokens do not include those found in the cache."""
        counts = usage(self.request.num_prompt_tokens, done, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": counts["completion_tokens"],
            "speculation": counts["speculation"],
        }  # fmt: skip
