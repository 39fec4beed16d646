"""Lines and results of OpenAI's batch format (platform.openai.com/docs/guides/batch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...text.checks import shown
from ..serve.openai_format import CHAT, COMPLETIONS, choice, in_our_words, usage

if TYPE_CHECKING:
    from ...outputs import RequestOutput
    from .batch_lines import Task


def from_openai(line: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(url, request in our words) of a line. Raises ValueError for what is not there."""
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in (CHAT, COMPLETIONS) or line.get("method", "POST") != "POST":
        raise ValueError(f'"url" must be "{CHAT}" or "{COMPLETIONS}" and "method" "POST", not {shown(url)}.')
    if not isinstance(body, dict):
        raise ValueError('"body" must be a JSON object, as is sent to the "url".')
    if unknown := sorted(line.keys() - {"custom_id", "id", "method", "url", "body"}):
        raise ValueError(f'unknown field {shown(unknown[0])}; what is asked stands in "body".')
    try:
        return url, in_our_words(url, body)
    except ValueError as error:
        raise ValueError(f'in "body": {error}') from None


def to_openai(
    task: Task, output: RequestOutput, model: str, bytes_of: Callable[[int], bytes] | None = None
) -> dict[str, Any]:
    """The line of a finished request; `bytes_of`: see `openai_format.logprobs`."""
    error = next((done.error for done in output.outputs if done.error), None)
    body = {
        "id": output.request_id,
        "object": "chat.completion" if task.url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice(task.url, done, task.params.logprobs, bytes_of) for done in output.outputs],
        "usage": usage(len(output.prompt_token_ids), output.outputs, len(output.outputs)),
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {
        "id": f"batch_req_{task.key}",
        "custom_id": (task.names or {}).get("custom_id"),
        "response": None if error else response,
        "error": {"code": "engine_error", "message": error} if error else None,
    }
