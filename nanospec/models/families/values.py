"""Reading a `config.json`: what all families have in common, checked value by value.

Values that a file may leave out get the default of their family; what the decoder cannot run (a variant of
RoPE, an activation, a quantized checkpoint) is refused with one sentence, never run approximately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ...text.checks import shown
from ..config import ModelConfig
from ..rope import Rope

KINDS = {
    int: "a positive integer of at most {most}",
    float: "a positive number from {least} to {most}",
    bool: "true or false",
}
# Indices are of 32 bits, and numbers float32. A tuple is made of as many layers before the weights are seen.
MOST = {"num_hidden_layers": 4096, "head_dim": 65536}
LEAST, LARGEST = 1e-30, 1e30
T = TypeVar("T", bool, int, float)
Raw = Mapping[str, Any]
Windows = tuple[int | None, ...]


def read(raw: Raw, *, activation: str = "silu", act_key: str = "hidden_act", **fields: Any) -> ModelConfig:
    """The fields that all families give the same names, and `fields`, which come first.

    `activation` is the one that `raw[act_key]` must name, in transformers' word.
    """
    if raw.get("quantization_config") is not None:
        raise ValueError(
            "Quantized checkpoints (with a quantization_config) are not supported; use the one "
            "stored in float32, bfloat16 or float16."
        )
    if (given := raw.get(act_key) or activation) != activation:
        raise ValueError(f"{act_key}={shown(given)} is not supported; only {activation!r} is.")
    hidden_size, num_heads = value(raw, "hidden_size", int), value(raw, "num_attention_heads", int)
    num_layers = value(raw, "num_hidden_layers", int)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    common = {
        "vocab_size": value(raw, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": value(raw, "intermediate_size", int),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": value(raw, "num_key_value_heads", int, num_heads),
        "head_dim": value(raw, "head_dim", int, hidden_size // num_heads),
        "max_position_embeddings": value(raw, "max_position_embeddings", int),
        "windows": (None,) * num_layers,
        "rms_norm_eps": value(raw, "rms_norm_eps", float),
        "tie_word_embeddings": value(raw, "tie_word_embeddings", bool, False),
        "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else shown(dtype),
    }
    if "rope" not in fields:
        common["rope"] = rope(raw)
    return ModelConfig(**{**common, **fields})


def value(raw: Raw, key: str, kind: type[T], default: T | None = None) -> T:
    """The value of a key, which must be one of `KINDS`; where it is absent or null, the default."""
    found = default if raw.get(key) is None else raw[key]
    if found is None:
        raise ValueError(f"{key!r} is missing.")
    least, most = (LEAST, LARGEST) if kind is float else (1, MOST.get(key, 2**31 - 1))
    fits = type(found) is bool if kind is bool else type(found) in (int, kind) and least <= found <= most
    if not fits:
        raise ValueError(f"{key}={shown(found)} must be {KINDS[kind].format(least=least, most=most)}.")
    return kind(found)


def optional(raw: Raw, key: str, default: float | None = None) -> float | None:
    """A number that may be null: none. Where it is absent, the default."""
    given = raw.get(key, default)
    return None if given is None else value({key: given}, key, float)


def layer_windows(raw: Raw, window: int | None) -> Windows:
    """The sliding window of each layer by `layer_types`."""
    num_layers, kinds = value(raw, "num_hidden_layers", int), raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"'layer_types' must be a list of {num_layers} entries, one per layer.")
    sees = {"full_attention": None, "sliding_attention": window}
    unknown = [kind for kind in kinds if kind not in list(sees)]
    if unknown:
        known = " and ".join(sees)
        raise ValueError(f"Layer type {shown(unknown[0])} is not supported; supported are {known}.")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(
            "'layer_types' has sliding_attention, but use_sliding_window or sliding_window is not set; set "
            "both, or make the layers full_attention."
        )
    return tuple(sees[kind] for kind in kinds)


def rope(raw: Raw, theta: float = 10000.0, partial: bool = False) -> Rope:
    """RoPE from `rope_theta` with `rope_scaling`, or from `rope_parameters` (transformers 5). `partial`:
    whether the family knows what to do with heads that are rotated in part."""
    given = rope_entry(raw)
    part = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if part != 1 and not partial:
        raise ValueError(f"partial_rotary_factor={shown(part)} is not supported here; only 1 is.")
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise ValueError(f"partial_rotary_factor={shown(part)} must be a number above 0 and at most 1.")
    theta = value(given, "rope_theta", float, value(raw, "rope_theta", float, theta))
    kind = given.get("rope_type", given.get("type", "default"))
    match kind:
        case "default":
            return Rope(theta=theta, part=float(part))
        case "linear":
            return Rope("linear", theta, factor=value(given, "factor", float), part=float(part))
        case "llama3":
            low, high = value(given, "low_freq_factor", float), value(given, "high_freq_factor", float)
            if low >= high:
                raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}.")
            factor, length = value(given, "factor", float), _original_max_len(raw, given)
            return Rope("llama3", theta, factor, low, high, length, float(part))
        case "longrope":
            length = _original_max_len(raw, given)
            if length == 1:
                raise ValueError("original_max_position_embeddings=1 of longrope must be at least 2.")
            longer = value(raw, "max_position_embeddings", int) / length
            return Rope(
                "longrope",
                theta,
                factor=value(given, "factor", float, longer),
                original_max_len=length,
                part=float(part),
                short_factors=_factors(given, "short_factor"),
                long_factors=_factors(given, "long_factor"),
                attention_factor=optional(given, "attention_factor"),
            )
    raise ValueError(f"RoPE type {shown(kind)} is not supported; default, linear, llama3 and longrope are.")


def rope_entry(raw: Raw) -> dict[str, Any]:
    """The object that says more of RoPE than its theta, {} if there is none."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{name}={shown(given)} must be an object.")
    if any(isinstance(entry, dict) for entry in given.values()):
        raise ValueError(f"{name} holds one RoPE per kind of layer; only one for all is supported.")
    return given


def _original_max_len(raw: Raw, given: Raw) -> int:
    """The context of pretraining, in Hugging Face's order: beside the RoPE entry, in it, or the longest."""
    length, key = value(raw, "max_position_embeddings", int), "original_max_position_embeddings"
    return value(raw, key, int, value(given, key, int, length))


def _factors(given: Raw, key: str) -> tuple[float, ...]:
    factors = given.get(key)
    if not isinstance(factors, list):
        raise ValueError(f"{key!r} of longrope must be a list of numbers, not {shown(factors)}.")
    return tuple(value({key: factor}, key, float) for factor in factors)
