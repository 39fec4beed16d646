"""Results: a `Completion` for each output, a `RequestOutput` for each prompt, and the engine's counters."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

NOT_TRACED = "No trace was recorded; enable tracing with LLM(..., trace=True)."


class Logprob(NamedTuple):
    """Log-probability of a token, its rank in the vocabulary (1 is the most likely token), and its text
    (`Tokenizer.text_of`; None without a tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Piece(NamedTuple):
    """The text of an output token and the source of the token: for an accepted draft, the index in prompt +
    output of the token it was copied from, -3 or less if it was copied from the prediction or from an earlier
    request, or -2 if it was not copied; -1 if the token was not a draft."""

    text: str
    source: int


@dataclass
class SpecStats:
    """Statistics of speculative decoding, for one request or for the whole engine.

    Steps are counted per request: a forward pass over B requests counts as B steps. Drafts after a stop or
    the length limit count as drafted but not as accepted. In a tree, drafts are numbered in creation order,
    and n accepted ones count as positions 0 to n - 1. `by_drafter`: [steps, drafted, accepted].
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
        """Count one step of one row; `drafter` is the method that proposed the drafts."""
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
        """Emitted tokens / steps; 1 without speculation."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def efficiency(self) -> float:
        """Emitted tokens / maximum possible tokens, which are d + 1 for a step with d drafts."""
        return self.num_tokens / max(self.num_drafted + self.num_steps, 1)

    @property
    def coverage(self) -> float:
        """Steps with drafts / steps."""
        return self.num_steps_with_drafts / max(self.num_steps, 1)

    def to_dict(self) -> dict[str, object]:
        counts = ("num_steps", "num_tokens", "num_drafted", "num_accepted")
        ratios = ("tokens_per_step", "acceptance_rate", "efficiency", "coverage")
        drafter_counts = ("num_steps", "num_drafted", "num_accepted")
        return {
            **({"acceptance": self.acceptance, "lossy": True} if self.acceptance != "exact" else {}),
            **{name: getattr(self, name) for name in counts},
            **{name: round(getattr(self, name), 4) for name in ratios},
            "drafted_by_position": self.drafted_by_position,
            "accepted_by_position": self.accepted_by_position,
            "by_drafter": {name: dict(zip(drafter_counts, n)) for name, n in self.by_drafter.items()},
        }


@dataclass
class Metrics:
    """Counters of an engine. `num_cached_tokens` counts prompt tokens found in the prefix cache,
    `num_prefill_tokens` those computed, including those recomputed after a preemption."""

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
        index: index of the output among the `n` outputs of its prompt.
        text, token_ids: the output. The text does not include the stop string; token_ids include the stop
            token or the tokens that completed the stop string.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or the token of `stop_token_ids` that ended the output; None if it ended
            with the model's end-of-sequence token or for another reason.
        error: reason why the engine aborted the request; None if it did not.
        logprobs: for each output token, a dict of id -> `Logprob` of this token and of the most likely ones;
            None if not requested. cumulative_logprob is the sum over the output tokens.
        num_text_tokens: number of leading token_ids that produced the text. They are followed by a stop token
            or by those removed with a stop string (of a run of byte tokens, as in Llama 2, all or none).
        pieces: text and source of each output token.
        seconds, first_token_seconds: time from the request's arrival to its end and to its first token.
        num_cached_tokens, num_preemptions: prompt tokens found in the prefix cache; number of preemptions.
        num_prediction_tokens, num_accepted_prediction_tokens: tokens of the request's prediction, and output
            tokens that were accepted drafts copied from it.
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
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    extension_data: Any = field(default=None, repr=False, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        # Ctrl-C may have interrupted the engine between adding a token and adding its log-probability.
        return sum(at[token].logprob for token, at in zip(self.token_ids, self.logprobs))

    def to_dict(self) -> dict[str, Any]:
        """Return the output as JSON-serializable types, without the pieces and `extension_data`."""
        names = ("text", "token_ids", "finish_reason", "stop_reason", "error")
        result = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logprobs is not None:
            result["logprobs"] = [{str(t): value[:2] for t, value in at.items()} for at in self.logprobs]
        times = {name: round(getattr(self, name), 6) for name in ("seconds", "first_token_seconds")}
        counted = ["num_cached_tokens", "num_preemptions"]
        if self.num_prediction_tokens:
            counted += ["num_prediction_tokens", "num_accepted_prediction_tokens"]
        counts = {name: getattr(self, name) for name in counted}
        return {**result, "stats": {**self.stats.to_dict(), **times, **counts}}


@dataclass
class RequestOutput:
    """The `n` outputs of one prompt, created when all of them are complete. Attributes of `Completion`, such
    as `text` and `token_ids`, are also available here and refer to the first output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]

    def trace(self) -> Any:
        """Return the step-by-step trace of all outputs. Raises ValueError without `LLM(trace=True)`."""
        if (data := self.outputs[0].extension_data) is None:
            raise ValueError(NOT_TRACED)
        return data.trace(self.outputs)

    def __getattr__(self, name: str) -> Any:
        if name != "cumulative_logprob" and name not in Completion.__dataclass_fields__:
            raise AttributeError(f"RequestOutput has no attribute {name!r}")
        return getattr(self.outputs[0], name)
