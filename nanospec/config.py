"""What a user may set about the engine and about speculation. Bad values are refused with a sentence.

What the checkpoint says about itself is in `model_config.py`; what one request asks for, in
`sampling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

METHODS = ("ngram", "none")


@dataclass(frozen=True)
class SpecConfig:
    """How to guess tokens.

    Attributes:
        method: "ngram" looks the last tokens up in the request's own text; "none" switches
            speculation off.
        num_speculative_tokens: K, the most drafts verified per request and step; "auto" chooses by
            measured cost and observed acceptance, up to `max_speculative_tokens`.
        prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that is looked up. Longer
            suffixes match less often and more reliably.
        max_speculative_tokens: the bound of "auto".
    """

    method: str = "ngram"
    num_speculative_tokens: int | Literal["auto"] = "auto"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    max_speculative_tokens: int = 16

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; use one of {', '.join(METHODS)}.")
        k = self.num_speculative_tokens
        if k != "auto" and (not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= 63):
            raise ValueError(f"num_speculative_tokens={k!r} must be 'auto' or an int from 0 to 63.")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= 32:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max="
                f"{self.prompt_lookup_max} must satisfy 1 <= min <= max <= 32."
            )
        if not 1 <= self.max_speculative_tokens <= 63:
            raise ValueError(
                f"max_speculative_tokens={self.max_speculative_tokens} must be between 1 and 63."
            )

    @property
    def max_k(self) -> int:
        """The largest K that can occur in a step."""
        if self.method == "none":
            return 0
        k = self.num_speculative_tokens
        return self.max_speculative_tokens if k == "auto" else k


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
        max_num_batched_tokens: most tokens scored in one step; longer prompts are split.
        block_size: tokens per page of the KV cache, a power of two from 16.
        kv_cache_memory: bytes for the KV cache; None takes what the machine can spare.
        enable_prefix_caching: reuse the pages of earlier requests with the same beginning.
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
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len={self.max_model_len} must be at least 2: one prompt token, one new one."
            )
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} must be a power of two, at least 16.")
        if self.kv_cache_memory is not None and self.kv_cache_memory <= 0:
            raise ValueError(f"kv_cache_memory={self.kv_cache_memory} bytes must be positive.")
