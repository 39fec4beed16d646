"""Llama 1, 2, 3.x and SmolLM2; Mistral, whose layers have a sliding window, if `sliding_window` is set."""

from __future__ import annotations

from ..config import ModelConfig
from .base import Family, Raw, read, value


class Llama(Family):
    def config(self, raw: Raw) -> ModelConfig:
        bias = value(raw, "attention_bias", bool, False)
        return read(raw, qkv_bias=bias, o_bias=bias, mlp_bias=value(raw, "mlp_bias", bool, False))


class Mistral(Family):
    def config(self, raw: Raw) -> ModelConfig:
        return read(raw, windows=(sliding_window(raw),) * value(raw, "num_hidden_layers", int))


def sliding_window(raw: Raw) -> int | None:
    """Return `sliding_window`: null means none, absent means 4096."""
    is_null = raw.get("sliding_window", 0) is None
    return None if is_null else value(raw, "sliding_window", int, 4096)
