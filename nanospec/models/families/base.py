"""The interface of families, and how they read a `config.json`: each value with a check.

    class Mine(Family):
        def config(self, raw):
            return read(raw, qkv_bias=True)

is a complete family if `ModelConfig` can express it and its tensors have the names of
`ModelConfig.parameter_shapes`. Values that a file may leave out get the default of their family. What the
decoder cannot run (a variant of RoPE, an activation, a quantized checkpoint) is refused with one sentence,
never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from ...text.checks import shown
from ..config import ModelConfig, Rope

KINDS = {
    int: "a positive integer of at most {most}",
    float: "a positive number from {least} to {most}",
    bool: "true or false",
}
MOST = {  # others fit 32 bits; there are tuples of layers and tables of positions
    "num_hidden_layers": 4096,
    "head_dim": 65536,
    "max_position_embeddings": 1 << 24,
}
T = TypeVar("T", bool, int, float)
Raw = Mapping[str, Any]
Windows = tuple[int | None, ...]


class Place(NamedTuple):
    """The place of one of our tensors in a checkpoint: rows `first` .. `first + rows - 1` of `name`."""

    name: str
    first: int
    rows: int


class Family:
    """Only `config` must be defined.

    Attributes:
        ignored: prefixes of tensors that text does not need, such as an image encoder's.
    """

    ignored: ClassVar[tuple[str, ...]] = ()

    def config(self, raw: Raw) -> ModelConfig:
        """Translate a `config.json`. Raises ValueError for what the decoder cannot run."""
        raise NotImplementedError

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of the tensor that holds ours of this name. Several of ours with one
        stored name are its rows, one below the other."""
        return name

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Return our tensor from its stored rows, a copy in the dtype to compute in."""
        return tensor

    def places(self, config: ModelConfig) -> dict[str, Place]:
        """Return the place of each of our tensors in a checkpoint."""
        filled: dict[str, int] = {}
        places = {}
        for name, (rows, *_) in config.parameter_shapes().items():
            whole = self.stored_name(name)
            places[name] = Place(whole, filled.get(whole, 0), rows)
            filled[whole] = places[name].first + rows
        return places

    def stored_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the checkpoint must have, by its own name."""
        places, ours = self.places(config), config.parameter_shapes()
        return {place.name: (place.first + place.rows, *ours[n][1:]) for n, place in places.items()}

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Return whether a stored tensor is not needed: RoPE frequencies, a tied head, `ignored` ones."""
        tied_head = name.endswith("lm_head.weight") and config.tie_word_embeddings
        return tied_head or name.endswith("rotary_emb.inv_freq") or name.startswith(self.ignored)


def read(raw: Raw, *, activation: str = "silu", act_key: str = "hidden_act", **fields: Any) -> ModelConfig:
    """Return the config with the fields that all families name alike, and `fields`, which take precedence.
    `raw[act_key]` must be `activation`, in the words of transformers."""
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
    same_names = "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"
    common = {
        **{name: value(raw, name, int) for name in same_names},
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": value(raw, "num_key_value_heads", int, num_heads),
        "head_dim": value(raw, "head_dim", int, hidden_size // num_heads),
        "windows": (None,) * num_layers,
        "rms_norm_eps": value(raw, "rms_norm_eps", float),
        "tie_word_embeddings": value(raw, "tie_word_embeddings", bool, False),
        "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else shown(dtype),
    }
    if "rope" not in fields:
        common["rope"] = rope(raw)
    return ModelConfig(**{**common, **fields})


def value(raw: Raw, key: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of a key, of one of `KINDS`, or the default if it is absent or null."""
    found = default if raw.get(key) is None else raw[key]
    if found is None:
        raise ValueError(f"{key!r} is missing.")
    least, most = (1e-30, 1e30) if kind is float else (1, MOST.get(key, 2**31 - 1))
    fits = type(found) is bool if kind is bool else type(found) in (int, kind) and least <= found <= most
    if not fits:
        raise ValueError(f"{key}={shown(found)} must be {KINDS[kind].format(least=least, most=most)}.")
    return kind(found)


def optional(raw: Raw, key: str, default: float | None = None) -> float | None:
    """Return a number, None if it is null, or the default if it is absent."""
    given = raw.get(key, default)
    return None if given is None else value({key: given}, key, float)


def layer_windows(raw: Raw, window: int | None, has_window: Callable[[int], bool]) -> Windows:
    """Return the sliding window of each layer, None for none: that of layer i by entry i of `layer_types`, or
    without that list by `has_window(i)`."""
    num_layers, kinds = value(raw, "num_hidden_layers", int), raw.get("layer_types")
    if kinds is None:
        return tuple(window if has_window(i) else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"'layer_types' must be a list of {num_layers} entries, one per layer.")
    by_kind = {"full_attention": None, "sliding_attention": window}
    if unknown := [kind for kind in kinds if kind not in list(by_kind)]:
        known = " and ".join(by_kind)
        raise ValueError(f"Layer type {shown(unknown[0])} is not supported; supported are {known}.")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(
            "'layer_types' has sliding_attention, but use_sliding_window or sliding_window is not set; set "
            "both, or make the layers full_attention."
        )
    return tuple(by_kind[kind] for kind in kinds)


def rope(raw: Raw, theta: float = 10000.0, partial: bool = False) -> Rope:
    """Return RoPE from `rope_theta` with `rope_scaling`, or from `rope_parameters` (transformers 5).
    `partial`: the family supports heads that are rotated in part."""
    given = rope_entry(raw)
    part = value({**raw, **given}, "partial_rotary_factor", float, 1.0)
    if part > 1 or (part < 1 and not partial):
        most = "a number of at most 1" if partial else "only 1"
        raise ValueError(f"partial_rotary_factor={part} is not supported here; {most} is.")
    theta = value(given, "rope_theta", float, value(raw, "rope_theta", float, theta))
    kind = given.get("rope_type", given.get("type", "default"))
    # The context of pretraining, in Hugging Face's order: beside the RoPE entry, in it, or the longest.
    longest, key = value(raw, "max_position_embeddings", int), "original_max_position_embeddings"
    length = value(raw, key, int, value(given, key, int, longest))
    match kind:
        case "default":
            return Rope(theta=theta, part=part)
        case "linear":
            return Rope("linear", theta, factor=value(given, "factor", float), part=part)
        case "llama3":
            low, high = value(given, "low_freq_factor", float), value(given, "high_freq_factor", float)
            if low >= high:
                raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}.")
            return Rope("llama3", theta, value(given, "factor", float), low, high, length, part)
        case "longrope":
            if length == 1:
                raise ValueError(f"{key}=1 of longrope must be at least 2.")
            return Rope(
                "longrope",
                theta,
                factor=value(given, "factor", float, longest / length),
                original_max_len=length,
                part=part,
                short_factors=_factors(given, "short_factor"),
                long_factors=_factors(given, "long_factor"),
                attention_factor=optional(given, "attention_factor"),
            )
    raise ValueError(f"RoPE type {shown(kind)} is not supported; default, linear, llama3 and longrope are.")


def rope_entry(raw: Raw) -> dict[str, Any]:
    """Return the object that describes RoPE beyond its theta, {} if there is none."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{name}={shown(given)} must be an object.")
    if any(isinstance(entry, dict) for entry in given.values()):
        raise ValueError(f"{name} holds one RoPE per kind of layer; only one for all is supported.")
    return given


def _factors(given: Raw, key: str) -> tuple[float, ...]:
    factors = given.get(key)
    if not isinstance(factors, list):
        raise ValueError(f"{key!r} of longrope must be a list of numbers, not {shown(factors)}.")
    return tuple(value({key: factor}, key, float) for factor in factors)
