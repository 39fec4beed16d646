"""What comes out: a completion per output, a `RequestOutput` per prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .engine.metrics import SpecStats
from .engine.request import Logprob, Piece, Request
from .extras.tracing.trace import Trace

if TYPE_CHECKING:
    from .extras.tracing.recorder import Record


@dataclass
class Completion:
    """One output of a prompt.

    Attributes:
        index: its number among the `n` of its prompt.
        text, token_ids: the output. A stop string is not part of the text; the token that completed
            it, or a stop token, is part of token_ids.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or the token of `stop_token_ids` that ended it; None for the model's own
            end of text.
        error: why it was aborted, if the engine did it.
        logprobs: per output token, {id: Logprob(logprob, rank, decoded_token)} of it and the likeliest, if
            asked for; cumulative_logprob is the sum of the output's own.
        num_text_tokens: how many of token_ids are of the text; behind them are a stop token, or those that a
            stop string cut off (of a run of byte tokens, as Llama 2 has them, all or none).
        pieces: the output token by token, showing which were drafted and from where they were copied.
        stats: what speculation did for it.
        seconds, first_token_seconds: from its arrival to its end, and to its first token.
        num_cached_tokens, num_preemptions: what the cache and the scheduler did with it.
        simulated: what made the output up, in a benchmark; None for output of the model.
        record: what an engine with `trace=True` kept of its steps; `trace()` shows it.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    error: str | None
    logprobs: list[dict[int, Logprob]] | None
    pieces: list[Piece]
    stats: SpecStats
    seconds: float
    first_token_seconds: float
    num_cached_tokens: int
    num_preemptions: int
    num_text_tokens: int
    simulated: str | None = None
    index: int = 0
    record: Record | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, request: Request, index: int = 0) -> Completion:
        """The result of a finished request."""
        end = request.finish_time or time.perf_counter()
        texts = request.token_texts or [""] * len(request.output_ids)
        return cls(
            text=request.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason or "abort",
            stop_reason=request.stop_reason,
            error=request.error,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            # Texts are one more where Ctrl-C came between the two.
            pieces=[Piece(*pair) for pair in zip(texts, request.draft_sources)],
            stats=request.stats,
            seconds=end - request.arrival_time,
            first_token_seconds=(request.first_token_time or end) - request.arrival_time,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_text_tokens=min(request.num_text_tokens, len(request.output_ids)),
            simulated=request.simulated,
            index=index,
            record=request.kept,
        )

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        # Ctrl-C may have come between a token and its log-probability.
        return sum(at[token].logprob for token, at in zip(self.token_ids, self.logprobs))

    def trace(self) -> Trace:
        """How it came about, step by step. Raises ValueError unless the engine has `trace=True`."""
        return Trace.of([self])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pieces, ready for JSON."""
        names = ("text", "token_ids", "finish_reason", "stop_reason", "error", "simulated")
        shown = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logprobs is not None:
            shown["logprobs"] = [{str(t): value[:2] for t, value in at.items()} for at in self.logprobs]
        times = {name: round(getattr(self, name), 6) for name in ("seconds", "first_token_seconds")}
        counts = {name: getattr(self, name) for name in ("num_cached_tokens", "num_preemptions")}
        return {**shown, "stats": {**self.stats.to_dict(), **times, **counts}}


@dataclass
class RequestOutput:
    """The `n` outputs of one prompt; `text`, `token_ids` and so on are the first one's. It is made when all
    of them have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = True

    @classmethod
    def of(cls, prompt: str | None, requests: Sequence[Request]) -> RequestOutput:
        """The result of the finished requests of one prompt."""
        done = [Completion.of(request, index) for index, request in enumerate(requests)]
        return cls(requests[0].id, prompt, requests[0].prompt_ids, done)

    def trace(self) -> Trace:
        """How all outputs came about, step by step; see `Completion.trace`."""
        return Trace.of(self.outputs)

    def __getattr__(self, name: str) -> Any:
        if name != "cumulative_logprob" and name not in Completion.__dataclass_fields__:
            raise AttributeError(f"RequestOutput has no attribute {name!r}")
        return getattr(self.outputs[0], name)
