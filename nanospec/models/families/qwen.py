"""Qwen2 and 2.5, with a bias on q, k, v; Qwen3, with RMSNorm per head on q and k. Windows on some layers."""

from __future__ import annotations

from ...text.checks import shown
from ..config import ModelConfig
from .base import Family, Raw, Windows, layer_windows, read, value
from .llama import sliding_window


class Qwen2(Family):
    def config(self, raw: Raw) -> ModelConfig:
        return read(raw, windows=_windows(raw), qkv_bias=True)


class Qwen3(Family):
    def config(self, raw: Raw) -> ModelConfig:
        bias, head_dim = value(raw, "attention_bias", bool, False), value(raw, "head_dim", int, 128)
        return read(raw, windows=_windows(raw), head_dim=head_dim, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _windows(raw: Raw) -> Windows:
    window = sliding_window(raw) if value(raw, "use_sliding_window", bool, False) else None
    first = 28 if raw.get("max_window_layers") is None else raw["max_window_layers"]
    if type(first) is not int or first < 0:
        raise ValueError(f"max_window_layers={shown(first)} must be an integer of at least 0.")
    return layer_windows(raw, window, lambda layer: layer >= first)
