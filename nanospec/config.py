"""Settings of the engine, of speculative decoding and of a request. Invalid values raise ValueError.

The limits and choices of a field are declared with it, for `check_fields`. This module imports neither torch
nor triton. `drafters/methods.py` checks that a drafter exists and supports the given options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from .kernels import MAX_DRAFTS, MAX_STOP_IDS, MAX_TREE_WIDTH
from .text.validation import bounded_field, check_fields, check_number, choice_field, parse_size, shown

MAX_REQUEST_STOP_IDS = MAX_STOP_IDS - 8  # the others are reserved for the model's end-of-sequence tokens
MAX_BIAS = 1_000_000
MAX_AUTO_K = 16  # the largest K that num_speculative_tokens="auto" chooses
GREEDY_BELOW = 1e-5  # lower temperatures are greedy: float32 rounding would outweigh the sampling noise
_MAX_INT = 2**31 - 1
_SEEDS = (-(2**63), 2**63 - 1)

SIMILAR = {"structured_outputs": "response_format", "guided_decoding": "response_format"}  # vLLM's


def check_names(options: Mapping[str, Any], settings: type) -> None:
    """Raise TypeError, suggesting the closest name, if an option is not a field of `settings`."""
    names = [each.name for each in fields(settings)]
    for name in options:
        if name not in names:
            close = get_close_matches(SIMILAR.get(name, shown(name).strip("'")), names, 1)
            hint = f"did you mean {close[0]}?" if close else f"available options: {', '.join(sorted(names))}."
            raise TypeError(f"{settings.__name__} has no option {shown(name)}; {hint}")


@dataclass(frozen=True)
class SpecConfig:
    """Speculative decoding settings.

    Attributes:
        method: drafter to use. "ngram" looks up the last tokens in the request's own text and proposes what
            followed them; "draft" runs a small model with the same vocabulary; "dflash" (a block of tokens
            per pass) and "eagle3" (a token per pass, up to 8) run a model that reads the target's hidden
            states. "ngram+draft" and so on run the model only where the lookup finds no match, or with
            automatic K on a CPU a short one. "none" disables speculation.
        draft_model: model for "draft", "dflash" or "eagle3": a local folder, a name under `weights/`, or a
            hub id; for "draft", also a GGUF file. The latter two default to `weights/drafters/NAME`, where
            NAME is that of the target.
        tree_width: maximum number of branches drafted per request, by "ngram" and "dflash"; 1 drafts a
            single chain. K limits the drafts of all branches together.
        acceptance: rule for accepting drafts. "exact" accepts drafts equal to the token sampled by the
            target; "typical" also accepts drafts that are likely enough under the target, which changes the
            output. Requests may choose their own rule unless the engine runs with "exact".
        num_speculative_tokens: K, the maximum number of drafts verified per request and step. "auto" chooses
            K, up to 16, from the measured cost of steps and the observed acceptance.
        prompt_lookup_min: minimum n-gram length for lookup.
        prompt_lookup_max: maximum n-gram length for lookup. Longer matches are rarer but more reliable.
        prompt_lookup_history: look up drafts in the texts of earlier requests too, if prefix caching is
            enabled. A server does so only for requests with the same API key or `cache_salt`.
    """

    method: str = "ngram"
    draft_model: str | None = None
    tree_width: int = bounded_field(1, 1, MAX_TREE_WIDTH)
    acceptance: str = choice_field("exact", "exact", "typical")
    num_speculative_tokens: int | Literal["auto"] = bounded_field("auto", 0, MAX_DRAFTS)
    prompt_lookup_min: int = bounded_field(1, 1, 32)
    prompt_lookup_max: int = bounded_field(8, 1, 32)
    prompt_lookup_history: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min={shortest} must not exceed prompt_lookup_max={longest}.")

    @classmethod
    def from_vllm(cls, config: Mapping[str, Any]) -> SpecConfig:
        """Convert vLLM's `speculative_config`, such as {"method": "ngram", "num_speculative_tokens": 4}. All
        fields of this class are supported. Raises TypeError or ValueError."""
        if not isinstance(config, Mapping):
            raise TypeError(f"speculative_config={shown(config)} must be a dict, e.g. {{'method': 'ngram'}}.")
        renamed = {"model": "draft_model"}
        options = {renamed.get(name, name): value for name, value in config.items() if value is not None}
        check_names(options, cls)
        options.setdefault("method", "draft" if "draft_model" in options else "ngram")
        if options["method"] == "draft_model":
            options["method"] = "draft"
        return cls(**options)

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafters in the order in which they propose; empty without speculation."""
        return () if self.method == "none" else tuple(self.method.split("+"))

    @property
    def max_k(self) -> int:
        """The largest K of any step."""
        k = self.num_speculative_tokens
        return 0 if self.method == "none" else MAX_AUTO_K if k == "auto" else k


SIMILAR.update(dict.fromkeys((each.name for each in fields(SpecConfig)), "spec"))  # for `EngineConfig`


@dataclass(frozen=True)
class EngineConfig:
    """Engine settings.

    Attributes:
        spec: speculative decoding settings.
        dtype: data type of weights and activations: "auto", "bfloat16", "float16" or "float32". "auto" uses
            the checkpoint's data type on a GPU; on a CPU, bfloat16 if the CPU is fast at it (AVX2 with a C++
            compiler, avx512_bf16, or AMX), otherwise float32.
        quantization: "int8" (symmetric) or "int4" (with minima) quantizes matrices while a checkpoint in
            16 or 32 bits is loaded; embedding and lm_head get 8 bits, and draft models are not quantized.
        device: device to run on: "auto", "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads of this process. "auto" uses OMP_NUM_THREADS if it is set, otherwise
            all cores within the container's CPU quota.
        max_num_seqs: maximum number of outputs that run at once; a request has `n`.
        max_model_len: maximum context length (prompt + output) in tokens. Defaults to the model's limit,
            reduced to what fits in the KV cache.
        max_num_batched_tokens: maximum number of tokens per step. Running requests take K + 1 each; prompts
            get the rest, at least one block, and are split into chunks if they are longer.
        block_size: number of tokens per KV cache block, a power of two and at least 16.
        kv_cache_memory: size of the KV cache in bytes, or a string such as "4G". Defaults to the rest of
            `gpu_memory_utilization`; on a CPU, to 40% of the free memory, at most 4 GiB.
        gpu_memory_utilization: share of the GPU's memory for weights, steps and KV cache; unused on a CPU.
        enable_prefix_caching: reuse the KV cache blocks of earlier requests with the same prefix.
        async_scheduling: schedule the next step before reading the results of the last one. Requires CUDA
            graphs. Enabled by default on a GPU.
        enforce_eager: do not capture steps as CUDA graphs. Enabled by default on a CPU.
        lazy_capture: capture each CUDA graph on first use, to start faster. No effect if K is "auto".
        tensor_parallel_size: number of devices to split the model among, with one process each, on this
            machine or, if started by torchrun, on several.
        distributed_timeout: timeout in seconds for communication between the processes of a split model.
        seed: base seed for requests without a seed.
        trace: record each step, with rejected drafts and timings, for `RequestOutput.trace()`.
    """

    spec: SpecConfig = field(default_factory=SpecConfig)
    dtype: str = choice_field("auto", "auto", "bfloat16", "float16", "float32")
    quantization: str | None = choice_field(None, "int8", "int4")
    device: str = "auto"
    threads: int | Literal["auto"] = bounded_field("auto", 1, 1024)
    max_num_seqs: int = bounded_field(64, 1, 1 << 16)
    max_model_len: int | None = bounded_field(None, 2)  # one prompt token and one output token
    max_num_batched_tokens: int = bounded_field(2048, 1, 1 << 24)
    block_size: int = bounded_field(16, 16)
    kv_cache_memory: int | None = bounded_field(None, 1, read=parse_size, metavar="SIZE")
    gpu_memory_utilization: float = bounded_field(0.9, 0.01, 1)
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    lazy_capture: bool = False
    tensor_parallel_size: int = bounded_field(1, 1, 64)
    distributed_timeout: int = bounded_field(300, 1, 10**7)
    seed: int = bounded_field(0, *_SEEDS)
    trace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.spec, SpecConfig):
            raise ValueError(f"spec={shown(self.spec)} must be a SpecConfig, e.g. SpecConfig(method='none').")
        check_fields(self)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} must be a power of two and at least 16.")

    @classmethod
    def from_options(cls, spec: SpecConfig | None, options: Mapping[str, Any]) -> EngineConfig:
        """Convert the options of `LLM`: fields of this class, and vLLM's `speculative_config`. Raises
        TypeError or ValueError."""
        settings = dict(options)
        if (speculative_config := settings.pop("speculative_config", None)) is not None:
            if spec is not None:
                raise TypeError("spec and speculative_config cannot be combined; pass one of them.")
            spec = SpecConfig.from_vllm(speculative_config)
        check_names(settings, cls)
        return cls(spec=spec or SpecConfig(), **settings)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. Names and defaults follow vLLM.

    Attributes:
        n: number of outputs to generate for the prompt.
        temperature: sampling temperature; 0 (or any value below 1e-5) means greedy decoding.
        top_p: sample from the smallest set of most likely tokens with at least this total probability.
        top_k: sample from the N most likely tokens; 0 or -1 considers all tokens.
        min_p: minimum probability of a token, relative to that of the most likely one.
        seed: random seed. The output for a seed depends neither on other requests nor on speculation.
        max_tokens: maximum number of tokens to generate; None generates up to the context length.
        min_tokens: minimum number of tokens to generate before stop tokens and stop strings take effect.
        stop: string or strings that end the output and are not included in it.
        stop_token_ids: token ids that end the output.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: return the log-probabilities of each output token and of the N most likely tokens.
        presence_penalty: value subtracted from the logits of tokens that occur in the output.
        frequency_penalty: value subtracted from the logit of a token for each time it occurs in the output.
        repetition_penalty: for tokens in prompt or output, positive logits are divided and negative logits
            multiplied by this value.
        logit_bias: map of token ids to values added to their logits.
        skip_special_tokens: omit special tokens, such as `<|im_end|>`, from the text.
        response_format: format that the output must have, such as {"type": "json_object"}.
        prediction: text (on the command line, a file with it) or token ids that the output may resemble, such
            as a file to be edited. N-gram lookup searches it like the request's own text. With `acceptance`
            "exact", it only affects speed; tokens beyond the context length are not used.
        num_speculative_tokens, tree_width, acceptance: as in `SpecConfig`, but for this request. Defaults to
            the engine's values, which the first two cannot exceed. K = 0 disables speculation.
    """

    n: int = bounded_field(1, 1, 1024)
    temperature: float = bounded_field(1.0, 0, 100)
    top_p: float = bounded_field(1.0, 1e-45, 1)  # the least positive float32
    top_k: int = bounded_field(0, -1, _MAX_INT)
    min_p: float = bounded_field(0.0, 0, 1)
    seed: int | None = bounded_field(None, *_SEEDS)
    max_tokens: int | None = bounded_field(16, 1, _MAX_INT)
    min_tokens: int = bounded_field(0, 0, _MAX_INT)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = bounded_field(None, 0, 20)
    presence_penalty: float = bounded_field(0.0, -2, 2)
    frequency_penalty: float = bounded_field(0.0, -2, 2)
    repetition_penalty: float = bounded_field(1.0, 0.01, 100)
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    response_format: Mapping[str, Any] | None = None
    prediction: str | Sequence[int] | None = None
    num_speculative_tokens: int | None = bounded_field(None, 0, MAX_DRAFTS)
    tree_width: int | None = bounded_field(None, 1, MAX_TREE_WIDTH)
    acceptance: str | None = choice_field(None, "exact", "typical")

    def __new__(cls, *args: Any, **options: Any) -> SamplingParams:
        check_names(options, cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}.")
        if not isinstance(self.prediction, str):
            _as_list("prediction", self.prediction, "a string or a list of token ids")
        stop, what = self.stop, "a non-empty string or a list of them"
        stop = [stop] if isinstance(stop, str) else _as_list("stop", stop, what)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={shown(self.stop)} must be {what}.")
        what = f"a list of at most {MAX_REQUEST_STOP_IDS} token ids"
        ids = _as_list("stop_token_ids", self.stop_token_ids, what, MAX_REQUEST_STOP_IDS)
        ids = [check_number("stop_token_ids: token", token, 0, _MAX_INT) for token in ids]
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias={shown(bias)} must map token ids to numbers.")
        by_id = {}
        for key, value in bias.items():
            is_text = isinstance(key, str) and key.isdecimal() and len(key) < 20  # JSON keys are strings
            token = check_number("logit_bias: token", int(key) if is_text else key, 0, _MAX_INT)
            by_id[token] = check_number(f"logit_bias[{token}]", value, -MAX_BIAS, MAX_BIAS, float)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "logit_bias", by_id)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, `logit_bias` or `min_tokens` change the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(self.logit_bias or self.min_tokens or penalties)


def _as_list(name: str, value: Any, what: str, most: float = math.inf) -> Sequence[Any]:
    """Return a sequence of at most `most` items, or () for None. Raises ValueError if it is not `what`."""
    value = () if value is None else value
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    if is_text or not isinstance(value, Sequence) or len(value) > most:
        raise ValueError(f"{name}={shown(value)} must be {what}.")
    return value
