"""Llama 1, 2, 3.x and SmolLM2; Mistral, whose layers have a sliding window, if `sliding_window` is set."""

from __future__ import annotations

from ..config import ModelConfig
from .base import Family
from .values import Raw, read, value


class Llama(Family, architectures=("LlamaForCausalLM",)):
    def config(self, raw: Raw) -> ModelConfig:
        bias = value(raw, "attention_bias", bool, False)
        return read(raw, qkv_bias=bias, o_bias=bias, mlp_bias=value(raw, "mlp_bias", bool, False))


class Mistral(Family, architectures=("MistralForCausalLM",)):
    def config(self, raw: Raw) -> ModelConfig:
        num_layers = value(raw, "num_hidden_layers", int)
        return read(raw, windows=(sliding_window(raw),) * num_layers)


def sliding_window(raw: Raw) -> int | None:
    """`sliding_window`: null means none, absent means 4096."""
    given = raw.get("sliding_window", 4096)
    return None if given is None else value(raw, "sliding_window", int, 4096)
