"""Relatives of Llama: Mistral, Qwen2 and 2.5, Qwen3, Phi-3, 3.5 and Phi-4-mini."""

import torch
from torch import Tensor

from ...text.validation import check_number
from ..config import ModelConfig
from . import Family, Raw, Windows, build_config, get_value, layer_windows, parse_rope, rope_entry

FUSED = {f"self_attn.{part}_proj": "self_attn.qkv_proj" for part in "qkv"}
FUSED |= {f"mlp.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")}


class Mistral(Family):
    """All layers have a sliding window if `sliding_window` is set."""

    def config(self, raw: Raw) -> ModelConfig:
        return build_config(raw, windows=(_sliding_window(raw),) * get_value(raw, "num_hidden_layers", int))


class Qwen2(Family):
    """A bias on q, k and v; sliding windows on some layers."""

    def config(self, raw: Raw) -> ModelConfig:
        return build_config(raw, windows=_qwen_windows(raw), qkv_bias=True)


class Qwen3(Family):
    """RMSNorm of each head of q and k; sliding windows on some layers."""

    def config(self, raw: Raw) -> ModelConfig:
        bias, head_dim = get_value(raw, "attention_bias", bool, False), get_value(raw, "head_dim", int, 128)
        windows = _qwen_windows(raw)
        return build_config(raw, windows=windows, head_dim=head_dim, qkv_bias=bias, o_bias=bias, qk_norm=True)


class Phi3(Family):
    """Checkpoints fuse q, k, v and gate, up; long contexts use longrope.

    Phi-4-mini rotates only part of each head: pairs (i, i + R/2) of its first R values. Kernels expect pairs
    D/2 apart, so `convert` reorders the values of a head in this way, with an angle of 0 for the rest. The
    order is the same for q and k, so q . k does not change.
    """

    def config(self, raw: Raw) -> ModelConfig:
        longest = get_value(raw, "max_position_embeddings", int)
        window = get_value(raw, "sliding_window", int, longest)
        given = rope_entry(raw)
        if given.get("rope_type", given.get("type")) in ("su", "yarn"):  # names of longrope in early files
            raw = {**raw, "rope_scaling": {**given, "rope_type": "longrope"}}
        windows = (window if window < longest else None,) * get_value(raw, "num_hidden_layers", int)
        return build_config(raw, windows=windows, rope=parse_rope(raw, partial=True))

    def stored_name(self, name: str) -> str:
        for ours, whole in FUSED.items():
            name = name.replace(ours, whole)
        return name

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        rotated = config.rope.rotated(config.head_dim)
        if rotated == config.head_dim or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor
        heads = tensor.unflatten(0, (-1, config.head_dim))
        pairs, rest = heads[:, :rotated].chunk(2, 1), heads[:, rotated:].chunk(2, 1)
        return torch.cat((pairs[0], rest[0], pairs[1], rest[1]), 1).flatten(0, 1)


def _sliding_window(raw: Raw) -> int | None:
    """Return `sliding_window`: None if it is null, 4096 if it is missing."""
    is_null = raw.get("sliding_window", 0) is None
    return None if is_null else get_value(raw, "sliding_window", int, 4096)


def _qwen_windows(raw: Raw) -> Windows:
    window = _sliding_window(raw) if get_value(raw, "use_sliding_window", bool, False) else None
    given = raw.get("max_window_layers")
    first = check_number("max_window_layers", 28 if given is None else given, 0)
    return layer_windows(raw, window, lambda layer: layer >= first)
