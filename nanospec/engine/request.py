"""A request: its state (waiting, running or finished), output and statistics.

`tokens` is prompt + output, committed tokens only. `num_computed` is the number of tokens whose K/V are in
the cache or are scheduled to be computed. Prefill computes all tokens but the last. Then each step scores
the last token and the drafts after it, so the first output token is sampled by the same code as all others.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig, SamplingParams
from ..device.extension import Constraint
from ..device.messages import Admission
from ..kernels import FROM_REFERENCE, LENGTH, MAX_STOP_IDS, NAN, RUNNING, STOPPED
from ..kernels.speculation.report import RowReport
from ..outputs import Completion, Logprob, Piece, RequestOutput, SpecStats
from ..text.chat import too_long
from ..text.files import errors_of
from ..text.tokenizer import OutputText, Tokenizer
from ..text.validation import as_int, shown
from .blocks import block_hash

SEED_STEP = 0x9E3779B97F4A7C15  # odd; gives consecutive requests unrelated seeds
NOT_FINITE = "the logits are NaN or infinite; check the weights and the dtype (float16 is limited to 65,504)."
FINISH = {RUNNING: None, STOPPED: "stop", LENGTH: "length", NAN: "abort"}


@dataclass(eq=False)
class Request:
    """A prompt and one output of it. See the module docstring for the invariants."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int  # length of prompt + output at which the request finishes
    max_k: int = 0  # maximum number of drafts per step
    stop_ids: tuple[int, ...] = ()  # token ids that end the output
    salt: bytes = b""  # root of the block hashes; only requests with the same salt share cached blocks
    output: OutputText = field(default_factory=lambda: OutputText(None))
    constraint: Constraint | None = None
    reference: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # see `Admission`

    row: int = -1  # -1 unless it is running
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0  # blocks registered in the prefix cache
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended the output
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    draft_sources: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    arrival_time: float = field(default_factory=time.perf_counter)
    start_time: float | None = None  # of the first admission
    first_token_time: float | None = None
    finish_time: float | None = None
    extension_data: Any = None  # data that an extension attaches to the output

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
        """Whether the request is ready to decode."""
        return self.num_computed >= self.num_tokens - 1

    def admission(self, num_cached: int) -> Admission:
        """Return the argument of `Worker.admit`. The K/V of the first `num_cached` blocks are cached."""
        return Admission(
            row=self.row,
            tokens=self.tokens,
            num_prompt=len(self.prompt_ids),
            reference=self.reference,
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
        """Return the hashes of all full blocks of `tokens`."""
        for i in range(len(self._hashes), self.num_tokens // block_size):
            parent = self._hashes[-1] if self._hashes else self.salt
            self._hashes.append(block_hash(parent, self.tokens[i * block_size : (i + 1) * block_size]))
        return self._hashes

    def append(self, report: RowReport, logprobs: list[dict[int, Logprob]] | None = None) -> int:
        """Append a step's tokens, up to the first stop string or the end of the constraint, and return their
        number; finish the request if it ends. A stop string takes precedence as finish reason, then the
        constraint, then `report.finished` of the device."""
        tokens, reason, error = report.tokens, FINISH[report.finished], None
        if (constraint := self.constraint) is not None:
            at_stop_token = report.finished == STOPPED  # which is not passed to the constraint
            num_kept = constraint.advance(tokens[:-1] if at_stop_token else tokens)
            if constraint.ended or constraint.error:
                tokens, error = tokens[:num_kept], constraint.error
                reason = "abort" if error else "stop"
        count, at_stop_string = 0, False
        while count < len(tokens) and not at_stop_string:
            self.tokens.append(tokens[count])
            count += 1
            is_stop_token = report.finished == STOPPED and count == len(report.tokens)
            at_stop_string = self.output.push(self.tokens[-1], is_text=not is_stop_token)
        if count and self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.draft_sources += report.sources[:count]
        if logprobs is not None:
            self.logprobs += map(self._with_texts, logprobs[:count])
        self.num_computed = self.num_tokens - 1
        if at_stop_string:
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
        """Finish with a reason. "length" becomes "stop" if the text flushed last completes a stop string."""
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
        """Return the pieces that have not been returned yet, see `OutputText`."""
        return self.output.new_pieces(self.draft_sources, self.is_finished)

    def completion(self, index: int = 0) -> Completion:
        """Return the output so far, as output `index` of its prompt."""
        end = self.finish_time or time.perf_counter()
        texts = self.output.token_texts or [""] * len(self.output_ids)
        predicted = self.params.prediction or ()
        start = FROM_REFERENCE - (len(self.reference) - len(predicted))  # the source of its first token
        num_copied = len({source for source in self.draft_sources if source <= start}) if predicted else 0
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
            num_prediction_tokens=len(predicted),
            num_accepted_prediction_tokens=num_copied,
            num_text_tokens=min(self.output.num_text_tokens, len(self.output_ids)),
            index=index,
            extension_data=self.extension_data,
        )


def make_output(prompt: str | None, requests: Sequence[Request]) -> RequestOutput:
    """Return the output of a prompt from its finished requests."""
    completions = [request.completion(index) for index, request in enumerate(requests)]
    return RequestOutput(requests[0].id, prompt, requests[0].prompt_ids, completions)


def params_per_prompt(params: Any, count: int) -> Sequence[SamplingParams]:
    """Return the parameters of `count` prompts, given one for all or one for each. Raises ValueError."""
    several = [params] * count if isinstance(params, SamplingParams) else params
    is_list = isinstance(several, Sequence) and len(several) == count
    if not is_list or not all(isinstance(each, SamplingParams) for each in several):
        what = f"SamplingParams, or a list of them, one for each of the {count} prompts"
        raise ValueError(f"sampling_params={shown(params)} must be {what}.")
    return several


def derive_seed(seed: int | None, index: int, number: int) -> int:
    """Return the int64 seed of output `index`, from the prompt's `seed` or, if None, the request `number`."""
    seed = number * SEED_STEP if seed is None else seed + index * SEED_STEP
    return (seed + 2**63) % 2**64 - 2**63  # wrap around


class Limits(NamedTuple):
    """The limits of an engine, which requests are checked against."""

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return all token ids that end a request."""
        eos_ids = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *eos_ids)))

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise ValueError if the engine cannot run the prompt."""
        if not prompt_ids:
            raise ValueError("The prompt is empty; it must have at least one token.")
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(too_long(len(prompt_ids), self.max_model_len))
        self._check_ids("The prompt", prompt_ids)

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the prediction as token ids, as many as fit in the window. Raises
        ValueError if the engine does not support them."""
        prediction, stop_ids = params.prediction, self.stop_ids(params)
        if self.tokenizer is None and (params.stop or isinstance(prediction, str)):
            raise ValueError("stop strings and a prediction as text require a tokenizer; use token ids.")
        if prediction is not None:
            if isinstance(prediction, str) and self.tokenizer is not None:
                prediction = _encode_prediction(prediction, self.tokenizer, self.max_model_len)
            params = replace(params, prediction=[*map(as_int, islice(prediction, self.max_model_len))])
        for name in ("logit_bias", "stop_token_ids", "prediction"):
            self._check_ids(name, getattr(params, name) or ())
        if len(stop_ids) > MAX_STOP_IDS:
            error = f"stop_token_ids and the model's end-of-sequence tokens total {len(stop_ids)} ids"
            raise ValueError(f"{error}, but the limit is {MAX_STOP_IDS}.")
        if params.acceptance not in (None, "exact") and self.config.spec.acceptance == "exact":
            raise ValueError(
                f"acceptance={params.acceptance!r} requires an engine started with SpecConfig(acceptance="
                f"{params.acceptance!r}); this one supports 'exact' only."
            )
        return params

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                error = f"{name} contains token id {shown(token)}"
                raise ValueError(f"{error}; ids are integers from 0 to {self.vocab_size - 1}.")


@lru_cache(maxsize=1)  # the lines of a batch may share a prediction
def _encode_prediction(text: str, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    with errors_of("prediction"):
        return tokenizer.encode_start(text, max_model_len)
