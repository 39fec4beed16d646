"""OpenAI's formats of requests and answers (platform.openai.com/docs/api-reference), as far as text goes.

Of the server and of batches. A request that needs what is not there (tools, images) is refused; only fields
of `IGNORED` are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from ..outputs import Completion, Logprob, Piece, SpecStats
from ..text import shown

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RENAMED = {"max_completion_tokens": "max_tokens"}
IGNORED = frozenset({  # they change no text; the model is the one that is loaded
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction",
})  # fmt: skip
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # fields, and their values that do not need what is not there
    "stream": (False,), "stream_options": (), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "skip_special_tokens": (True,),
}  # fmt: skip
# How byte-level vocabularies (GPT-2's and those after it) write bytes: letters for themselves, others beyond.
LETTERS = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = [byte for byte in range(256) if byte not in LETTERS]
BYTES = {chr(byte): byte for byte in LETTERS} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def translate_request(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request by the names of `SamplingParams`, with "messages" or "prompt". Raises ValueError or
    TypeError for features that are not there."""
    request: dict[str, Any] = {}
    for theirs, ours in RENAMED.items():
        if body.get(theirs) is not None and body.get(ours) not in (None, body[theirs]):
            raise ValueError(f'"{theirs}" and "{ours}" are two words for one; give one of them.')
    for name, value in body.items():
        if value is None or name in IGNORED or (name in UNSUPPORTED and value in UNSUPPORTED[name]):
            continue
        if name in UNSUPPORTED:
            quoted = f": {shown(value)}" if isinstance(value, str | int | float) else ""
            raise ValueError(f'"{name}" asks for what nanospec does not do{quoted}.')
        request[RENAMED.get(name) or name] = value
    if url == CHAT:
        request.update(_chat_logprobs(request))
        request["messages"] = normalize_messages(request.get("messages"))
    elif "messages" in request:
        raise ValueError(f'"messages" belong to {CHAT}.')
    elif isinstance(prompts := request.get("prompt"), list) and len(prompts) == 1:
        request["prompt"] = prompts if isinstance(prompts[0], int) else prompts[0]
    return request


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, also if they were given in parts, or as null. Raises
    ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one {"role": ..., "content": ...}.')
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise ValueError(f'"messages" hold {shown(message)}, which needs a "role" and a "content".')
    if message.get("tool_calls"):
        raise ValueError('"messages" hold "tool_calls", and nanospec knows no tools.')
    parts = message["content"]
    if parts is None or isinstance(parts, str):
        return {**message, "content": parts or ""}
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'"messages" hold {shown(part)}, which is no text; nanospec reads texts only.')
    return {**message, "content": "".join(part["text"] for part in parts)}


def _chat_logprobs(request: dict[str, Any]) -> dict[str, int]:
    """Replace OpenAI's flag and number of likeliest tokens by that number alone."""
    enabled, top = request.pop("logprobs", False), request.pop("top_logprobs", 0)
    if not isinstance(enabled, bool) or (top and not enabled):
        raise ValueError('"logprobs" must be true or false in a chat, and true with "top_logprobs".')
    return {"logprobs": top} if enabled else {}


def response_header(url: str, request_id: str, model: str, chunk: bool = False) -> dict[str, Any]:
    """Return the fields that begin a response, or with `chunk` an event of a stream."""
    kind = "chat.completion" + ".chunk" * chunk if url == CHAT else "text_completion"
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def choice(url: str, done: Completion, number: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return an output; `number`: of likeliest tokens to report, None for no log-probabilities."""
    text = {"message": {"role": "assistant", "content": done.text}} if url == CHAT else {"text": done.text}
    positions = (done.logprobs or [])[: done.num_text_tokens]
    entries = logprobs(url, positions, done.pieces, number, tokenizer)
    reasons = {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    return {"index": done.index, **text, "logprobs": entries, **reasons}


def logprobs(
    url: str,
    positions: Sequence[Mapping[int, Logprob]],
    pieces: Sequence[Piece],
    number: int | None,
    tokenizer: Tokenizer,
    offset: int = 0,
) -> dict[str, Any] | None:
    """Return the log-probabilities of the tokens at `positions`, which come first there, and of the `number`
    likeliest; None if `number` is. The text of `pieces`, the same tokens, begins at `offset`."""
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
    """Return the bytes of a token with this text, also if they are part of a character."""
    if "\ufffd" in text:
        raw = tokenizer.backend.id_to_token(token) or ""
        if token in tokenizer.byte_token_ids:
            return bytes.fromhex(raw[3:5])
        if all(letter in BYTES for letter in raw):
            return bytes(BYTES[letter] for letter in raw)
    return text.encode()


def usage(num_prompt: int, outputs: Sequence[Completion], n: int) -> dict[str, Any]:
    """Return tokens in and out, and what guessing did (`speculation`, which is ours). Each prompt has `n`
    outputs; what the others share with the first one is no find in the cache."""
    cached = sum(done.num_cached_tokens for done in outputs if done.index % n == 0)
    names = ("num_steps", "num_tokens", "num_drafted", "num_accepted")
    spec = SpecStats(**{name: sum(getattr(done.stats, name) for done in outputs) for name in names})
    reported = ("num_steps", "num_drafted", "num_accepted", "tokens_per_step", "acceptance_rate")
    return {
        **counts(num_prompt, sum(len(done.token_ids) for done in outputs)),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": spec.num_accepted,
            "rejected_prediction_tokens": spec.num_drafted - spec.num_accepted,
        },
        "speculation": {name: value for name, value in spec.to_dict().items() if name in reported},
    }


def counts(num_prompt: int, num_output: int) -> dict[str, int]:
    """Return numbers of tokens, as usage has them."""
    total = num_prompt + num_output
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": total}
