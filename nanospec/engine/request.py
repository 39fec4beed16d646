"""A request's life: waiting, running, finished; what it has produced and what it cost.

`tokens` is prompt + output, committed tokens only. `num_computed` counts the tokens whose K/V lie in
the cache. Prefill brings it to len(tokens) - 1; from then on every step scores the last token (and
drafts after it), so the same code draws the first token and all others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config import EngineConfig, SamplingParams
from ..device.extension import Constraint
from ..device.orders import Admission
from ..kernels import LENGTH, MAX_STOP_IDS, NAN, RUNNING, STOPPED
from ..kernels.speculation.report import RowReport
from ..outputs import Completion, Logprob, Piece, RequestOutput, SpecStats
from ..text import shown
from ..text.chat import too_long
from ..text.tokenizer import OutputText, Tokenizer
from .blocks import block_hash

SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get unrelated seeds
NOT_FINITE = "the model gave NaN or infinite logits; check its weights and dtype (float16 ends at 65,504)."
FINISH = {RUNNING: None, STOPPED: "stop", LENGTH: "length", NAN: "abort"}


@dataclass(eq=False)
class Request:
    """One prompt with one output. See the module docstring for the invariants.

    Attributes:
        max_len: the length of prompt + output at which it ends.
        max_k: the most drafts that it gets in a step.
        stop_ids: tokens that end it.
        salt: the root of its block hashes; requests share cached blocks iff their salts are equal.
        output: the text of its output.
        constraint: what an extension holds its output to.
        extension_data: what an extension attaches, for its output.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    max_k: int = 0
    stop_ids: tuple[int, ...] = ()
    salt: bytes = b""
    output: OutputText = field(default_factory=lambda: OutputText(None))
    constraint: Constraint | None = None

    row: int = -1  # while it does not run
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0  # blocks named in the prefix cache
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    draft_sources: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # of its prompt, found in the prefix cache when it first got a row
    num_preemptions: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    arrival_time: float = field(default_factory=time.perf_counter)
    start_time: float | None = None  # when it first got a row
    first_token_time: float | None = None
    finish_time: float | None = None
    extension_data: Any = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self._hashes: list[bytes] = []

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether it can take part in decoding."""
        return self.num_computed >= self.num_tokens - 1

    def admission(self, num_cached: int) -> Admission:
        """Return the request for the worker; the first `num_cached` of its blocks hold their K/V already."""
        return Admission(
            row=self.row,
            tokens=self.tokens,
            num_prompt=len(self.prompt_ids),
            max_len=self.max_len,
            blocks=self.blocks,
            num_cached=num_cached,
            seed=self.seed,
            stop_ids=self.stop_ids,
            params=self.params,
            max_k=self.max_k,
            constrained=self.constraint is not None,
        )

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the names of all full blocks of `tokens`."""
        for i in range(len(self._hashes), self.num_tokens // block_size):
            parent = self._hashes[-1] if self._hashes else self.salt
            self._hashes.append(block_hash(parent, self.tokens[i * block_size : (i + 1) * block_size]))
        return self._hashes

    def append(self, step: RowReport, logprobs: list[dict[int, Logprob]] | None = None) -> int:
        """Take a step's tokens, cut at the end of its constraint and at the first stop string, which ends the
        request; return their number. A stop string comes before all that follows it, a constraint before
        what the device has found."""
        tokens, reason, error = step.tokens, FINISH[step.finished], None
        if (constraint := self.constraint) is not None:
            ends = step.finished == STOPPED  # by a token that the constraint does not see
            taken = constraint.advance(tokens[:-1] if ends else tokens)
            if constraint.ended or constraint.error:
                tokens, error = tokens[:taken], constraint.error
                reason = "abort" if error else "stop"
        count, at_string = 0, False
        while count < len(tokens) and not at_string:
            self.tokens.append(tokens[count])
            count += 1
            is_stop_token = step.finished == STOPPED and count == len(step.tokens)
            at_string = self.output.push(self.tokens[-1], is_text=not is_stop_token)
        if count and self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.draft_sources += step.sources[:count]
        if logprobs is not None:
            self.logprobs += map(self._with_texts, logprobs[:count])
        self.num_computed = self.num_tokens - 1
        if at_string:
            reason, error = "stop", None
        elif reason == "abort" and error is None:
            error = f"At position {self.num_tokens} {NOT_FINITE}"
        self.error = error
        if reason is not None:
            self.finish(reason)
        return count

    def _with_texts(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if (tokenizer := self.output.tokenizer) is None:
            return entry
        return {t: at._replace(decoded_token=tokenizer.text_of(t)) for t, at in entry.items()}

    def finish(self, reason: str) -> None:
        """End the request: "stop", "length" or "abort". Text held back so far may complete a stop string."""
        if self.is_finished:
            return
        if self.output.flush() and reason == "length":
            reason = "stop"
        self.stop_reason = self.output.stop
        if reason == "stop" and self.stop_reason is None and self.tokens[-1] in self.params.stop_token_ids:
            self.stop_reason = self.tokens[-1]
        self.finish_time = time.perf_counter()
        self.finish_reason = reason

    @property
    def text(self) -> str:
        return self.output.text

    def new_pieces(self) -> list[Piece]:
        """Return the pieces of the text not handed out yet, see `OutputText`."""
        return self.output.new_pieces(self.draft_sources, self.is_finished)

    def completion(self, index: int = 0) -> Completion:
        """Return the result of the request, which may not have ended."""
        end = self.finish_time or time.perf_counter()
        texts = self.output.token_texts or [""] * len(self.output_ids)
        return Completion(
            text=self.text,
            token_ids=self.output_ids,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            pieces=list(map(Piece, texts, self.draft_sources)),
            stats=self.stats,
            seconds=end - self.arrival_time,
            first_token_seconds=(self.first_token_time or end) - self.arrival_time,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_text_tokens=min(self.output.num_text_tokens, len(self.output_ids)),
            index=index,
            extension_data=self.extension_data,
        )


def output_of(prompt: str | None, requests: Sequence[Request]) -> RequestOutput:
    """Return the result of the finished requests of one prompt."""
    done = [request.completion(index) for index, request in enumerate(requests)]
    return RequestOutput(requests[0].id, prompt, requests[0].prompt_ids, done)


def params_of_each(given: Any, count: int) -> Sequence[SamplingParams]:
    """Return the parameters of each of `count` prompts, from those `given` for all (None: the default) or for
    each. Raises ValueError."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, Sequence):
        raise ValueError(f"sampling_params={shown(given)} must be SamplingParams, or a list of them.")
    if len(given) != count:
        raise ValueError(f"{count} prompts need as many SamplingParams, not {len(given)}.")
    for params in given:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{shown(params)} must be SamplingParams, as in SamplingParams(temperature=0).")
    return given


def seed_of(given: int | None, index: int, number: int) -> int:
    """Return the int64 seed of a request's output `index`, from the `given` one or its `number`."""
    seed = number * SEED_STEP if given is None else given + index * SEED_STEP
    return (seed + 2**63) % 2**64 - 2**63  # wrapped around


class Limits(NamedTuple):
    """What an engine can run."""

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return all tokens that end a request."""
        own = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *own)))


def check_request(prompt_ids: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """Raise ValueError with a sentence if an engine with these limits cannot run the request."""
    config, size, max_model_len, tokenizer = limits
    stop_ids = limits.stop_ids(params)
    if not prompt_ids:
        raise ValueError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= max_model_len:
        raise ValueError(too_long(len(prompt_ids), max_model_len))
    own = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for name, ids in {"The prompt": prompt_ids, **own}.items():
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                said = f"{name} holds token id {shown(token)}"
                raise ValueError(f"{said}; ids are integers from 0 to {size - 1}.")
    if len(stop_ids) > MAX_STOP_IDS:
        said = f"stop_token_ids and the model's own end tokens are {len(stop_ids)} ids"
        raise ValueError(f"{said}, but the limit is {MAX_STOP_IDS}.")
    if params.acceptance not in (None, "exact") and config.spec.acceptance == "exact":
        raise ValueError(
            f"acceptance={params.acceptance!r} needs an engine started with SpecConfig(acceptance="
            f"{params.acceptance!r}): with 'exact', steps have no room for other rules."
        )
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer; use stop_token_ids or load one.")
