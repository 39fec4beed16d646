"""What one request asks for. The names and defaults are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_STOP_IDS = 32  # per request, EOS included; the width of a device row
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        n: how many outputs to draw for the prompt.
        temperature: 0 is greedy.
        top_p, top_k, min_p: keep the smallest set of likeliest tokens of mass top_p; the top_k
            likeliest (0 or -1: all); those at least min_p times as likely as the likeliest.
        seed: the same seed gives the same tokens, whatever else runs and with speculation on or off.
        max_tokens: most new tokens; None goes on to the end of the window.
        min_tokens: no stop token or stop string ends the output before.
        stop, stop_token_ids: strings (not part of the output) and tokens that end it.
        ignore_eos: go on after the model's own end-of-sequence tokens.
        logprobs: also give the log-probability of each output token and of this many likeliest.
        presence_penalty, frequency_penalty: subtracted for tokens in the output, once or per count.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in
            prompt or output.
        logit_bias: token id -> number added to its logit.
        num_speculative_tokens: this request's own limit of drafts per step; None is the engine's, 0
            does not speculate.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(
            self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()}
        )
        self._check("n", self.n, 1, 1024, int)
        self._check("temperature", self.temperature, 0.0, 100.0, float)
        self._check("top_k", self.top_k, -1, 2**31 - 1, int)
        self._check("min_p", self.min_p, 0.0, 1.0, float)
        self._check("min_tokens", self.min_tokens, 0, 2**31 - 1, int)
        self._check("presence_penalty", self.presence_penalty, -2.0, 2.0, float)
        self._check("frequency_penalty", self.frequency_penalty, -2.0, 2.0, float)
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens, 1, 2**31 - 1, int)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}."
                )
        if self.seed is not None:
            self._check("seed", self.seed, -(2**63), 2**63 - 1, int)
        if self.logprobs is not None:
            self._check("logprobs", self.logprobs, 0, MAX_LOGPROBS, int)
        if self.num_speculative_tokens is not None:
            self._check("num_speculative_tokens", self.num_speculative_tokens, 0, 63, int)
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValueError(
                f"top_p={self.top_p!r} must be above 0 and at most 1; for greedy decoding use temperature=0."
            )
        if not _is_number(self.repetition_penalty) or not 0.0 < self.repetition_penalty <= 100.0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty!r} must be above 0 and at most 100."
            )
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={self.stop!r} must hold non-empty strings.")
        if len(self.stop_token_ids) > MAX_STOP_IDS - 8:
            raise ValueError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids; the limit is {MAX_STOP_IDS - 8}."
            )
        if any(not -1e6 <= b <= 1e6 for b in self.logit_bias.values()):
            raise ValueError("logit_bias values must be between -1e6 and 1e6.")

    @staticmethod
    def _check(name: str, value: object, low: float, high: float, kind: type) -> None:
        right = isinstance(value, int) and not isinstance(value, bool) if kind is int else _is_number(value)
        if not right or not low <= value <= high:  # type: ignore[operator]
            what = "an integer" if kind is int else "a number"
            raise ValueError(f"{name}={value!r} must be {what} from {low:g} to {high:g}.")

    @property
    def shapes_logits(self) -> bool:
        """Whether anything but temperature and the filters changes the logits."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
