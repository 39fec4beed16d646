"""What comes out: a completion per output, a `RequestOutput` per prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

LOSSY = ("typical",)  # rules of acceptance that change what comes out
NOT_TRACED = "There is no trace of this: start the engine with LLM(..., trace=True)."


class Logprob(NamedTuple):
    """Log-probability of a token, its rank among all (1 is the likeliest), and its text
    (`Tokenizer.text_of`), if there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Piece(NamedTuple):
    """Text of one output token, and its source: if it was drafted, the index (in prompt + output) of the
    token it was copied from, or -2 for the guess of a model; -1 if it was not drafted."""

    text: str
    source: int


@dataclass
class SpecStats:
    """Counters of speculation, for one request or for the whole engine.

    A *step* is one row in one forward pass; tokens per step are over all of them, also those without
    drafts. Drafts behind a stop or the length limit count as drafted, not as accepted. In trees a
    draft's position is its place in the order they were made in, and the accepted ones are counted as if
    they were the first; `by_drafter` has steps, drafted and accepted of each. `acceptance` is the rule.
    """

    acceptance: str = "exact"
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps_with_drafts: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)

    def record(self, drafted: int, accepted: int, emitted: int, drafter: str) -> None:
        """Add one step of one row; `drafter` is the method that guessed."""
        self.num_steps += 1
        self.num_tokens += emitted
        if not drafted:
            return
        self.num_steps_with_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        before = self.by_drafter.get(drafter, (0, 0, 0))
        self.by_drafter[drafter] = [a + b for a, b in zip(before, (1, drafted, accepted))]
        for counts, count in (self.drafted_by_position, drafted), (self.accepted_by_position, accepted):
            counts += [0] * (drafted - len(counts))
            for i in range(count):
                counts[i] += 1

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens over all steps; 1 without speculation."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def efficiency(self) -> float:
        """Emitted / possible tokens, where a step with d drafts could have emitted d + 1."""
        return self.num_tokens / max(self.num_drafted + self.num_steps, 1)

    @property
    def coverage(self) -> float:
        """Share of the steps that had drafts."""
        return self.num_steps_with_drafts / max(self.num_steps, 1)

    def to_dict(self) -> dict[str, object]:
        counts = ("num_steps", "num_tokens", "num_drafted", "num_accepted")
        ratios = ("tokens_per_step", "acceptance_rate", "efficiency", "coverage")
        of_drafter = ("num_steps", "num_drafted", "num_accepted")
        return {
            **({"acceptance": self.acceptance} if self.acceptance != "exact" else {}),
            **({"lossy": True} if self.acceptance in LOSSY else {}),
            **{name: getattr(self, name) for name in counts},
            **{name: round(getattr(self, name), 4) for name in ratios},
            "drafted_by_position": self.drafted_by_position,
            "accepted_by_position": self.accepted_by_position,
            "by_drafter": {name: dict(zip(of_drafter, own)) for name, own in self.by_drafter.items()},
        }


@dataclass
class Metrics:
    """Counters of an engine. Of the tokens of prompts `num_cached_tokens` were found in the prefix cache;
    `num_prefill_tokens` were computed, those of preempted requests again."""

    spec: SpecStats
    num_forward_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0

    def to_dict(self) -> dict[str, object]:
        counts = {name: value for name, value in vars(self).items() if name.startswith("num_")}
        return {**self.spec.to_dict(), **counts}


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
        extension_data: what an extension attached to it.
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
    index: int = 0
    extension_data: Any = field(default=None, repr=False, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        # Ctrl-C may have come between a token and its log-probability.
        return sum(at[token].logprob for token, at in zip(self.token_ids, self.logprobs))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pieces, ready for JSON."""
        names = ("text", "token_ids", "finish_reason", "stop_reason", "error")
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

    def trace(self) -> Any:
        """Return how all outputs came about, step by step. Raises ValueError without `LLM(trace=True)`."""
        if (data := self.outputs[0].extension_data) is None:
            raise ValueError(NOT_TRACED)
        return data.trace(self.outputs)

    def __getattr__(self, name: str) -> Any:
        if name != "cumulative_logprob" and name not in Completion.__dataclass_fields__:
            raise AttributeError(f"RequestOutput has no attribute {name!r}")
        return getattr(self.outputs[0], name)
