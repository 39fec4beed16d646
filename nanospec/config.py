"""Settings of the engine, of speculation and of a request. Bad values are refused with a sentence.

The limit of a field stands beside it, or in `kernels/__init__.py`. What a checkpoint says about itself is in
`models/config.py`. This file needs neither torch nor triton; whether a drafter exists and takes its options
is checked when it is loaded (`drafters/methods.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from .kernels import MAX_DRAFTS, MAX_STOP_IDS, MAX_TREE_WIDTH, RULES
from .text import as_bytes, as_int, check_fields, check_number, limited, shown

MAX_OWN_IDS = MAX_STOP_IDS - 8  # leaves room for the model's end-of-sequence tokens
MAX_BIAS = 1_000_000
_MAX_INT = 2**31 - 1
GREEDY_BELOW = 1e-5  # the temperature: from here down rounding in float32, not chance, would choose
_SEEDS = (-(2**63), 2**63 - 1)

ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}  # vLLM's names of options of `EngineConfig`


def check_acceptance(rule: str | None) -> None:
    """Raise ValueError unless this is the name of a rule of acceptance, or None."""
    if rule is not None and rule not in RULES:
        raise ValueError(f"acceptance={shown(rule)} is unknown; use one of {', '.join(RULES)}.")


def check_names(options: Mapping[str, Any], settings: type) -> None:
    """Raise TypeError, with the closest name, if an option is no field of the settings."""
    names = [each.name for each in fields(settings)]
    for name in options:
        if name not in names:
            close = get_close_matches(shown(name).strip("'"), names, 1)
            meant = f"the closest is {close[0]}" if close else f"known are {', '.join(sorted(names))}"
            raise TypeError(f"{shown(name)} is no option of {settings.__name__}; {meant}.")


@dataclass(frozen=True)
class SpecConfig:
    """How to guess tokens.

    Attributes:
        method: "ngram" looks the last tokens up in the request's own text; "draft" lets a small model of
            the same vocabulary write ahead; "medusa" has heads guess from the target's last hidden state.
            "ngram+draft", "ngram+medusa": a model where lookup finds nothing; "none" does not speculate.
        draft_model: for "draft": a folder, a name under `weights/`, or a hub id.
        heads: for "medusa": a file; None takes the one under `weights/heads/` that is named
            like the target.
        tree_width: most continuations guessed for a request in one step; 1 guesses chains. K stays the
            number of all drafts, however they branch.
        acceptance: which drafts are accepted: "exact", those that equal the target's own draw;
            "rejection", by probability ratio (lossless in distribution; with a draft model that samples,
            more are accepted); "typical", those that the target finds likely enough, which changes the
            output. An engine started with another rule than "exact" lets every request choose its own.
        num_speculative_tokens: K, the most drafts verified per request and step; "auto" chooses by
            measured cost and observed acceptance.
        max_speculative_tokens: the bound of "auto".
        prompt_lookup_min: shortest suffix that is looked up.
        prompt_lookup_max: longest suffix that is looked up. Longer ones match less often and more reliably.
    """

    method: str = "ngram"
    draft_model: str | None = None
    heads: str | None = None
    tree_width: int = limited(1, 1, MAX_TREE_WIDTH)
    acceptance: str = "exact"
    num_speculative_tokens: int | Literal["auto"] = limited("auto", 0, MAX_DRAFTS)
    prompt_lookup_min: int = limited(1, 1, 32)
    prompt_lookup_max: int = limited(8, 1, 32)
    max_speculative_tokens: int = limited(16, 1, MAX_DRAFTS)

    def __post_init__(self) -> None:
        check_fields(self)
        check_acceptance(self.acceptance)
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min={shortest} must not exceed prompt_lookup_max={longest}.")

    @classmethod
    def from_vllm(cls, asked: Mapping[str, Any]) -> SpecConfig:
        """Read vLLM's `speculative_config`, such as {"method": "ngram", "num_speculative_tokens": 4}; any
        field of this class may stand in it. Raises TypeError or ValueError."""
        if not isinstance(asked, Mapping):
            raise TypeError(f"speculative_config={shown(asked)} must be a dict, as in {{'method': 'ngram'}}.")
        ours = {name: value for name, value in asked.items() if value is not None}
        for name in ("method", "model"):
            if not isinstance(ours.get(name, ""), str):
                raise TypeError(f"speculative_config: {name}={shown(ours[name])} must be a text.")
        model, method = ours.pop("model", None), ours.pop("method", None)
        if model in ("ngram", "[ngram]"):  # as older versions have it
            model, method = None, "ngram"
        method = "draft" if method == "draft_model" else method or ("draft" if model else "ngram")
        if model is not None:
            ours["heads" if method == "medusa" else "draft_model"] = model
        if "prompt_lookup_min" in ours:  # alone it is the longest, too
            ours.setdefault("prompt_lookup_max", ours["prompt_lookup_min"])
        check_names(ours, cls)
        return cls(method=method, **ours)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order in which they guess; () if none does."""
        return () if self.method == "none" else tuple(self.method.split("+"))

    @property
    def max_k(self) -> int:
        """The largest K that can occur in a step."""
        k = self.num_speculative_tokens
        return 0 if self.method == "none" else self.max_speculative_tokens if k == "auto" else k


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        spec: speculation.
        dtype: "auto", "bfloat16", "float16" or "float32"; auto is the checkpoint's on a GPU, bfloat16
            on a CPU that computes it fast (with AVX2 and a C++ compiler, or with avx512_bf16 or AMX), else
            float32.
        device: "auto", "cpu", "cuda" or "cuda:N".
        threads: how many compute on a CPU, in all of this process; "auto" takes what the machine has and
            others leave.
        max_num_seqs: most requests that run at once (rows of the device state).
        max_model_len: longest prompt + output in tokens; None takes the model's own limit, lowered to
            what the KV cache holds.
        max_num_batched_tokens: most tokens scored in one step; longer prompts are split. Running requests
            come first, each with K + 1 tokens; beside them prompts get at least one block.
        block_size: tokens per page of the KV cache, a power of two from 16.
        kv_cache_memory: bytes for the KV cache, or a text such as "4G"; None takes what the
            machine can spare.
        enable_prefix_caching: reuse the pages of earlier requests with the same beginning.
        async_scheduling: queue the next step before reading the results of the last, if steps are
            captured; None: on a GPU.
        enforce_eager: no captured steps (CUDA graphs); None: on a CPU.
        lazy_capture: record a step when it is first needed, for a fast start.
        tensor_parallel_size: among how many devices, each with a process of its own, the model is split:
            those of this machine or, started by torchrun, of several.
        distributed_timeout: seconds after which processes that do not answer are given up.
        seed: base of the seeds of requests that set none.
        trace: keep what `RequestOutput.trace()` shows of each step, rejected guesses and times among it.
    """

    spec: SpecConfig = field(default_factory=SpecConfig)
    dtype: str = "auto"
    device: str = "auto"
    threads: int | Literal["auto"] = limited("auto", 1, 1024)
    max_num_seqs: int = limited(64, 1, 1 << 16)
    max_model_len: int | None = limited(None, 2)  # one prompt token, one new one
    max_num_batched_tokens: int = limited(2048, 1, 1 << 24)
    block_size: int = limited(16, 16)
    kv_cache_memory: int | None = limited(None, 1, read=as_bytes, metavar="SIZE")
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    lazy_capture: bool = False
    tensor_parallel_size: int = limited(1, 1, 64)
    distributed_timeout: int = limited(300, 1, 10**7)
    seed: int = limited(0, *_SEEDS)
    trace: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_memory", as_bytes(self.kv_cache_memory))
        if not isinstance(self.spec, SpecConfig):
            raise ValueError(f"spec={shown(self.spec)} must be a SpecConfig, say SpecConfig(method='ngram').")
        check_fields(self)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} must be a power of two, at least 16.")

    @classmethod
    def from_options(cls, spec: SpecConfig | None, options: Mapping[str, Any]) -> EngineConfig:
        """Read the options of `LLM`: fields of this class, or `speculative_config` and other names that vLLM
        has for them. Raises TypeError or ValueError."""
        ours = {ALIASES.get(name, name): value for name, value in options.items()}
        if (asked := ours.pop("speculative_config", None)) is not None:
            if spec is not None:
                raise TypeError("spec and speculative_config are the same in two words; give one of them.")
            spec = SpecConfig.from_vllm(asked)
        check_names(ours, cls)
        return cls(spec=spec or SpecConfig(), **ours)


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. The names and defaults are vLLM's.

    Attributes:
        n: how many outputs to draw for the prompt.
        temperature: 0, or below 1e-5, is greedy.
        top_p: keep the smallest set of likeliest tokens that has this mass.
        top_k: keep so many likeliest tokens; 0 or -1: all.
        min_p: keep tokens that are at least so many times as likely as the likeliest.
        seed: the same seed gives the same tokens, whatever else runs and with speculation on or off.
        max_tokens: most new tokens; None goes on to the end of the window.
        min_tokens: no stop token or stop string ends the output before.
        stop: strings that end the output, and are no part of it.
        stop_token_ids: tokens that end the output.
        ignore_eos: go on after the model's own end-of-sequence tokens.
        logprobs: also give the log-probability of each output token and of this many likeliest.
        presence_penalty: subtracted once from the logits of tokens in the output.
        frequency_penalty: subtracted as often as a token is in the output.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in
            prompt or output.
        logit_bias: token id -> number added to its logit.
        response_format: what the output must be, {"type": "json_object"} say; None: any text. It is checked
            when the request enters the engine.
        num_speculative_tokens, tree_width, acceptance: as in `SpecConfig`, for this request alone; None
            is the engine's. 0 drafts do not speculate.
    """

    n: int = limited(1, 1, 1024)
    temperature: float = limited(1.0, 0, 100)
    top_p: float = limited(1.0, 0, 1)
    top_k: int = limited(0, -1, _MAX_INT)
    min_p: float = limited(0.0, 0, 1)
    seed: int | None = limited(None, *_SEEDS)
    max_tokens: int | None = limited(16, 1, _MAX_INT)
    min_tokens: int = limited(0, 0, _MAX_INT)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = limited(None, 0, 20)
    presence_penalty: float = limited(0.0, -2, 2)
    frequency_penalty: float = limited(0.0, -2, 2)
    repetition_penalty: float = limited(1.0, 0.01, 100)
    logit_bias: dict[int, float] = field(default_factory=dict)
    response_format: Mapping[str, Any] | None = None
    num_speculative_tokens: int | None = limited(None, 0, MAX_DRAFTS)
    tree_width: int | None = limited(None, 1, MAX_TREE_WIDTH)
    acceptance: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        check_fields(self)
        check_acceptance(self.acceptance)
        if self.top_p == 0:
            raise ValueError("top_p=0 must be above 0; for greedy decoding use temperature=0.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}.")
        for token in self.stop_token_ids:
            check_number("stop_token_ids: token", token, 0, _MAX_INT)
        for token, bias in self.logit_bias.items():
            check_number("logit_bias: token", token, 0, _MAX_INT)
            self.logit_bias[token] = check_number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS, float)

    def _normalise(self) -> None:
        """Turn what may be given as any sequence, or as None, into tuples and a dict of our own."""
        stop: Any = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        ids: Any = () if self.stop_token_ids is None else self.stop_token_ids
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(stop, Sequence) or any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={shown(self.stop)} must be a non-empty string or a list of such.")
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or len(ids) > MAX_OWN_IDS:
            said = f"stop_token_ids={shown(ids)}"
            raise ValueError(f"{said} must be a list of at most {MAX_OWN_IDS} token ids.")
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias={shown(bias)} must map token ids to numbers.")
        by_id: dict[Any, Any] = {}
        for key, value in bias.items():
            is_text = isinstance(key, str) and key.isdecimal() and len(key) < 20  # as JSON has it
            token = int(key) if is_text else as_int(key)
            if token in by_id:
                raise ValueError(f"logit_bias={shown(bias)} names token {token} twice; give it one number.")
            by_id[token] = value
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(as_int, ids)))
        object.__setattr__(self, "logit_bias", by_id)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature, top-k, top-p and min-p changes the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(self.logit_bias or self.min_tokens or penalties)
