"""What one request asks for. The names and defaults are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .config import MAX_TREE_WIDTH, check_acceptance, check_bool, check_number

MAX_STOP_IDS = 32  # per request, EOS included; the width of a device row
MAX_LOGPROBS = 20
_MAX_INT = 2**31 - 1


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
        tree_width: this request's own limit of continuations guessed per step; None is the engine's, 1
            guesses chains.
        acceptance: "exact", "rejection" or "typical" (see `SpecConfig`); None is the engine's.
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
    tree_width: int | None = None
    acceptance: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        check_number("n", self.n, 1, 1024)
        check_number("temperature", self.temperature, 0, 100, float)
        check_number("top_k", self.top_k, -1, _MAX_INT)
        check_number("min_p", self.min_p, 0, 1, float)
        check_number("min_tokens", self.min_tokens, 0, _MAX_INT)
        check_number("presence_penalty", self.presence_penalty, -2, 2, float)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2, float)
        check_number("repetition_penalty", self.repetition_penalty, 0, 100, float)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty=0 must be above 0; 1 has no effect.")
        check_number("top_p", self.top_p, 0, 1, float)
        if self.top_p == 0:
            raise ValueError("top_p=0 must be above 0; for greedy decoding use temperature=0.")
        if self.max_tokens is not None:
            check_number("max_tokens", self.max_tokens, 1, _MAX_INT)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}."
                )
        if self.seed is not None:
            check_number("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            check_number("num_speculative_tokens", self.num_speculative_tokens, 0, 63)
        if self.tree_width is not None:
            check_number("tree_width", self.tree_width, 1, MAX_TREE_WIDTH)
        if self.acceptance is not None:
            check_acceptance(self.acceptance)
        check_bool("ignore_eos", self.ignore_eos)
        for token in self.stop_token_ids:
            check_number("stop_token_ids: token", token, 0, _MAX_INT)
        for token, bias in self.logit_bias.items():
            check_number("logit_bias: token", token, 0, _MAX_INT)
            check_number(f"logit_bias[{token}]", bias, -1_000_000, 1_000_000, float)

    def _normalise(self) -> None:
        """Turn what may be given as any sequence, or as None, into tuples and a dict of our own."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        ids, bias = self.stop_token_ids or (), self.logit_bias or {}
        if not isinstance(stop, Sequence) or any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={self.stop!r} must be a non-empty string or a list of such.")
        if not isinstance(ids, Sequence) or len(ids) > MAX_STOP_IDS - 8:
            raise ValueError(
                f"stop_token_ids={ids!r} must be a list of at most {MAX_STOP_IDS - 8} token ids."
            )
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias={bias!r} must map token ids to numbers.")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        by_id = {int(t) if str(t).isdecimal() else t: b for t, b in bias.items()}  # JSON's are strings
        object.__setattr__(self, "logit_bias", by_id)

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

