"""What a user may set about the engine and about speculation. Bad values are refused with a sentence.

What the checkpoint says about itself is in `model_config.py`; what one request asks for, in
`sampling.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from .kernels.codes import RULES as ACCEPTANCE

METHODS = ("ngram", "draft", "medusa", "ngram+draft", "ngram+medusa", "none")
MAX_TREE_WIDTH = 8


def check_number(
    name: str, value: object, low: float, high: float = math.inf, kind: type = int
) -> None:
    """Raise ValueError unless `value` is an int (kind float: any real number) from low to high."""
    numbers = (int,) if kind is int else (int, float)
    if isinstance(value, numbers) and not isinstance(value, bool) and low <= value <= high:
        return
    what = "an integer" if kind is int else "a number"
    limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
    raise ValueError(f"{name}={value!r} must be {what} {limits}.")


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False: the text "no", say, would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")


def check_acceptance(rule: object) -> None:
    """Raise ValueError unless `rule` names a rule of acceptance."""
    if rule not in ACCEPTANCE:
        raise ValueError(f"acceptance={rule!r} is unknown; use one of {', '.join(ACCEPTANCE)}.")


@dataclass(frozen=True)
class SpecConfig:
    """How to guess tokens.

    Attributes:
        method: "ngram" looks the last tokens up in the request's own text; "draft" lets a small model of
            the same vocabulary write ahead; "medusa" has several heads guess from the target's last
            hidden state; "ngram+draft" and "ngram+medusa" ask the model where the text gives no match;
            "none" switches speculation off.
        draft_model: for "draft": a folder, a name under `weights/`, or a hub id.
        heads: for "medusa": a file or folder; None takes the one under `weights/heads/` that is named
            like the target.
        tree_width: most continuations guessed for a request in one step; 1 guesses chains. K stays the
            number of all drafts, however they branch.
        acceptance: which drafts are accepted: "exact", those that equal the target's own draw;
            "rejection", by probability ratio (lossless in distribution; with a draft model that samples,
            more are accepted); "typical", those that the target finds likely enough, which changes the
            output. An engine started with another rule than "exact" lets every request choose its own.
        num_speculative_tokens: K, the most drafts verified per request and step; "auto" chooses by
            measured cost and observed acceptance, up to `max_speculative_tokens`.
        prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that is looked up. Longer
            suffixes match less often and more reliably.
        max_speculative_tokens: the bound of "auto".
        speculation_lengths: the Ks for which steps are recorded (GPU), as far as the bounds above allow.
    """

    method: str = "ngram"
    draft_model: str | None = None
    heads: str | None = None
    tree_width: int = 1
    acceptance: str = "exact"
    num_speculative_tokens: int | Literal["auto"] = "auto"
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 8
    max_speculative_tokens: int = 16
    speculation_lengths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; use one of {', '.join(METHODS)}.")
        for name, method in (("draft_model", "draft"), ("heads", "medusa")):
            if getattr(self, name) is not None and method not in self.methods:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is of no use to method={self.method!r}; use "
                    f"method={method!r}."
                )
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) == "":
                raise ValueError(f"{name}={getattr(self, name)!r} must be the name of a folder or file.")
        check_number("tree_width", self.tree_width, 1, MAX_TREE_WIDTH)
        if self.tree_width > 1 and not {"ngram", "medusa"} & set(self.methods):
            raise ValueError(
                f"tree_width={self.tree_width} is of no use to method={self.method!r}, which guesses chains."
            )
        check_acceptance(self.acceptance)
        k = self.num_speculative_tokens
        if k != "auto" and (not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= 63):
            raise ValueError(f"num_speculative_tokens={k!r} must be 'auto' or an int from 0 to 63.")
        check_number("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        check_number("prompt_lookup_min", self.prompt_lookup_min, 1, 32)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must not exceed prompt_lookup_max="
                f"{self.prompt_lookup_max}."
            )
        check_number("max_speculative_tokens", self.max_speculative_tokens, 1, 63)
        if not isinstance(self.speculation_lengths, tuple | list):
            raise ValueError(f"speculation_lengths={self.speculation_lengths!r} must be a tuple of integers.")
        for k in self.speculation_lengths:
            check_number("speculation_lengths", k, 0, 63)

    @property
    def methods(self) -> tuple[str, ...]:
        """Who guesses, first come first; nobody: ()."""
        return () if self.method == "none" else tuple(self.method.split("+"))

    @property
    def max_k(self) -> int:
        """The largest K that can occur in a step."""
        if self.method == "none":
            return 0
        k = self.num_speculative_tokens
        return self.max_speculative_tokens if k == "auto" else k

    @property
    def ks(self) -> tuple[int, ...]:
        """The Ks to record: those of `speculation_lengths` within the bound, 0 and the bound itself."""
        return tuple(sorted({0, self.max_k, *(k for k in self.speculation_lengths if k < self.max_k)}))


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        spec: speculation.
        dtype: "auto", "bfloat16", "float16" or "float32"; auto is the checkpoint's on a GPU, bfloat16
            on a CPU that computes it fast, else float32.
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_num_seqs: most requests that run at once (rows of the device state).
        max_model_len: longest prompt + output in tokens; None takes the model's own limit, lowered to
            what the KV cache holds.
        max_num_batched_tokens: most tokens scored in one step; longer prompts are split. Running requests
            come first, each with K + 1 tokens; beside them prompts get at least one block.
        block_size: tokens per page of the KV cache, a power of two from 16.
        kv_cache_memory: bytes for the KV cache; None takes what the machine can spare.
        enable_prefix_caching: reuse the pages of earlier requests with the same beginning.
        async_scheduling: queue the next step before reading the results of the last; None: on a GPU.
        enforce_eager: no recorded steps (CUDA graphs); None: on a CPU.
        lazy_capture: record a step when it is first needed, for a fast start.
        seed: base of the seeds of requests that set none.
    """

    spec: SpecConfig = field(default_factory=SpecConfig)
    dtype: str = "auto"
    device: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    lazy_capture: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.spec, SpecConfig):
            raise ValueError(f"spec={self.spec!r} must be a SpecConfig, as in SpecConfig(method='ngram').")
        check_number("max_num_seqs", self.max_num_seqs, 1)
        check_number("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_model_len is not None:  # one prompt token, one new one
            check_number("max_model_len", self.max_model_len, 2)
        check_number("block_size", self.block_size, 16)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} must be a power of two, at least 16.")
        if self.kv_cache_memory is not None:
            check_number("kv_cache_memory", self.kv_cache_memory, 1)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("lazy_capture", self.lazy_capture)
        for name in ("async_scheduling", "enforce_eager"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        check_number("seed", self.seed, -(2**63), 2**63 - 1)
