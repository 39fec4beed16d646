"""OpenAI's formats of requests and answers (platform.openai.com/docs/api-reference), as far as text goes.

Of the server and of batches. A request that needs what is not there (tools, images) is refused; nothing is
dropped but `IGNORED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..outputs import Completion
    from ..request import Logprob

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


def in_our_words(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked, by the names of `SamplingParams`, with "messages" or "prompt". Raises ValueError for
    what is not there."""
    request: dict[str, Any] = {}
    for theirs, ours in RENAMED.items():
        if body.get(theirs) is not None and body.get(ours) not in (None, body[theirs]):
            raise ValueError(f'"{theirs}" and "{ours}" are two words for one; give one of them.')
    for name, value in body.items():
        if name in ONLY and value is not None and value not in ONLY[name]:
            raise ValueError(f'"{name}" asks for what nanospec does not do: {_short(value)}.')
        if value is not None and name not in IGNORED and name not in ONLY:
            request[RENAMED.get(name) or name] = value
    if url == CHAT:
        request.update(_chat_logprobs(request))
        messages = request.get("messages")
        if not isinstance(messages, list):
            raise ValueError('"messages" must be a list.')
        request["messages"] = [_flat(message) for message in messages]
    elif isinstance(several := request.get("prompt"), list) and len(several) == 1:
        request["prompt"] = several if isinstance(several[0], int) else several[0]
    return request


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
        raise ValueError(f"{_short(other[0])} in a message is no text, and nanospec reads texts only.")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else shown[:200] + "..."


def choice(url: str, done: Completion, number: int | None) -> dict[str, Any]:
    """An output; `number`: of likeliest tokens to report, None for no log-probabilities."""
    text = {"message": {"role": "assistant", "content": done.text}} if url == CHAT else {"text": done.text}
    found = None if number is None else logprobs(url, done.token_ids, done.logprobs or (), number)
    return {"index": done.index, **text, "logprobs": found, "finish_reason": done.finish_reason}


def logprobs(
    url: str, tokens: Iterable[int], places: Iterable[Mapping[int, Logprob]], number: int, offset: int = 0
) -> dict[str, Any]:
    """Of each of the tokens, and the `number` likeliest; the first is `offset` characters into the output."""

    def entry(found: Logprob) -> dict[str, Any]:
        text = found.decoded_token or ""
        return {"token": text, "logprob": found.logprob, "bytes": list(text.encode())}

    own, top, offsets = [], [], []
    for token, at in zip(tokens, places):
        own.append(entry(at[token]))
        likeliest = sorted((found for found in at.values() if found.rank <= number), key=lambda f: f.rank)
        top.append(list(map(entry, likeliest)))
        offsets.append(offset)
        offset += len(own[-1]["token"])
    if url == CHAT:
        return {"content": [{**place, "top_logprobs": best} for place, best in zip(own, top)]}
    return {
        "tokens": [place["token"] for place in own],
        "token_logprobs": [place["logprob"] for place in own],
        "top_logprobs": [{each["token"]: each["logprob"] for each in best} for best in top],
        "text_offset": offsets,
    }


def usage(num_prompt: int, outputs: Sequence[Completion]) -> dict[str, Any]:
    """Tokens in and out, and what guessing did (`speculation`, which is ours)."""
    num_output = sum(len(done.token_ids) for done in outputs)
    cached = sum(done.num_cached_tokens for done in outputs)  # outputs of one prompt share its blocks
    stats = [done.stats for done in outputs]
    drafted, accepted = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
    steps, tokens = sum(s.num_steps for s in stats), sum(s.num_tokens for s in stats)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": min(cached, num_prompt)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "num_steps": steps,
            "num_drafted": drafted,
            "num_accepted": accepted,
            "tokens_per_step": round(tokens / max(steps, 1), 4),
            "acceptance_rate": round(accepted / max(drafted, 1), 4),
        },
    }
