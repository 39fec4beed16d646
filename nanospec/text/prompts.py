"""Take prompts in all forms: texts, token ids in lists, arrays or tensors, one or several, conversations.
Anything else, and texts too long for the window, are refused before they are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .checks import as_token_id, shown

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


def as_list(prompts: Any) -> list[Any]:
    """Return prompts as a list, a single one as a list of one."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or _is_scalar(prompts):
        return [prompts]
    if not _is_row(prompts):
        raise ValueError(f"prompts={shown(prompts)} must be a text, token ids, or a list of these.")
    return [prompts] if len(prompts) and _is_scalar(prompts[0]) else list(prompts)


def text_and_ids(prompt: Any, max_model_len: int) -> tuple[str | None, Any]:
    """Return the text and the token ids of a prompt, None for what it does not have. With both, ids count."""
    given = prompt
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown := sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids"})):
        raise ValueError(f"a prompt holds {shown(unknown[0])}; known are 'prompt' and 'prompt_token_ids'.")
    are_ids = not isinstance(ids, str | bytes | bytearray) and _is_row(ids)
    if not (isinstance(text, str) if ids is None else are_ids and isinstance(text, str | None)):
        raise ValueError(f"{shown(given)} needs a text as 'prompt' or token ids as 'prompt_token_ids'.")
    if ids is not None and len(ids) >= max_model_len:
        raise ValueError(too_long(len(ids), max_model_len))
    return text, None if ids is None else list(map(as_token_id, ids))


def conversations(messages: Any) -> list[Any]:
    """Return conversations as a list, a single one as a list of one."""
    is_one = _is_row(messages) and len(messages) > 0 and isinstance(messages[0], Mapping)
    return list(messages) if isinstance(messages, list | tuple) and not is_one else [messages]


def check_conversation(messages: Any) -> None:
    """Raise ValueError unless this is a list of messages."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        raise ValueError(f"messages={shown(messages)} must be a list of {{'role': ..., 'content': ...}}.")


def as_message(prompt: str) -> list[dict[str, Any]]:
    """Return a conversation whose only message is the prompt."""
    return [{"role": "user", "content": prompt}]


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Put a system message in front of a conversation that has none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def encode(tokenizer: Tokenizer, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text. Raises ValueError for a text that cannot fit."""
    check_length(tokenizer, len(text), max_model_len)
    return tokenizer.encode(text, add_special_tokens)


def check_length(tokenizer: Tokenizer, length: int, max_model_len: int) -> None:
    """Raise ValueError for a text of so many characters that it cannot fit, before encoding takes long."""
    if length > max_model_len * tokenizer.longest_token:
        raise ValueError(f"The prompt has {length} characters, too many for max_model_len={max_model_len}.")


def too_long(num_tokens: int, max_model_len: int) -> str:
    """Return the message for a prompt of too many tokens."""
    return (
        f"The prompt has {num_tokens} tokens, but max_model_len={max_model_len} must hold it and at least "
        "one new token; shorten it or raise max_model_len."
    )


def _is_scalar(value: object) -> bool:
    """Return whether this may be one token id, also as a tensor or an array."""
    if isinstance(value, str):  # numpy's strings have no dimensions either
        return False
    return not isinstance(value, Iterable) or getattr(value, "ndim", None) == 0


def _is_row(value: object) -> bool:
    """Return whether this has a length and an order: a list, or an array of at least one dimension."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
