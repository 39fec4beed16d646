"""Model families: how to read a `config.json`, and how checkpoints name and store weights.

A `Family` that only defines `config` is complete if the names of its tensors are those of
`ModelConfig.parameter_shapes`; `docs/extend-model.md` shows how to write one. Optional values have the
defaults of their family. Features that the decoder does not support (a variant of RoPE, an activation) raise
ValueError; none is approximated. `formats/` reads the `quantization_config`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ...text.files import errors_of, read_json
from ...text.validation import check_number, shown
from ..config import ModelConfig, Rope

MOST = {  # maximum values (others: int32); they bound layer tuples, kernel tiles and RoPE tables
    "num_hidden_layers": 4096,
    "head_dim": 256,
    "max_position_embeddings": 1 << 24,
}
T = TypeVar("T", bool, int, float)
Raw = Mapping[str, Any]
Windows = tuple[int | None, ...]


class Family:
    """Llama 1, 2, 3.x and SmolLM2. Other families override what differs."""

    # Prefixes of tensors that are not needed for text, such as those of an image encoder.
    ignored: ClassVar[tuple[str, ...]] = ()

    def config(self, raw: Raw) -> ModelConfig:
        """Translate a `config.json`. Raises ValueError for values that the decoder does not support."""
        bias = get_value(raw, "attention_bias", bool, False)
        return build_config(raw, qkv_bias=bias, o_bias=bias, mlp_bias=get_value(raw, "mlp_bias", bool, False))

    def stored_name(self, name: str) -> str:
        """Map a tensor's name in nanospec to the checkpoint's. Names that map to the same one are fused:
        the stored tensor has the rows of each, in the order of `parameter_shapes`."""
        return name

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Convert rows of a stored tensor to nanospec's layout, on the device and in the compute dtype."""
        return tensor

    def places(self, config: ModelConfig) -> dict[str, tuple[str, slice]]:
        """Return the location of each tensor in a checkpoint: the stored name, and the rows in it."""
        places: dict[str, tuple[str, slice]] = {}
        filled: Counter[str] = Counter()  # rows by stored name
        for name, (rows, *_) in config.parameter_shapes().items():
            whole = self.stored_name(name)
            places[name] = whole, slice(filled[whole], filled[whole] + rows)
            filled[whole] += rows
        return places

    def stored_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that the checkpoint must have, by their stored names."""
        ours = config.parameter_shapes()
        return {whole: (rows.stop, *ours[n][1:]) for n, (whole, rows) in self.places(config).items()}

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Return whether a stored tensor is not needed: RoPE frequencies, a tied lm_head, `ignored` ones."""
        tied_head = name.endswith("lm_head.weight") and config.tie_word_embeddings
        return tied_head or name.endswith("rotary_emb.inv_freq") or name.startswith(self.ignored)


# By `architectures` of a `config.json`: a class, or "FILE.CLASS" in this folder, imported on use.
FAMILIES: dict[str, str | type[Family]] = {
    "Gemma2ForCausalLM": "gemma.Gemma2",
    "Gemma3ForCausalLM": "gemma.Gemma3",
    "Gemma3ForConditionalGeneration": "gemma.Gemma3WithImages",
    "LlamaForCausalLM": Family,
    "MistralForCausalLM": "llama_like.Mistral",
    "Phi3ForCausalLM": "llama_like.Phi3",
    "Qwen2ForCausalLM": "llama_like.Qwen2",
    "Qwen3ForCausalLM": "llama_like.Qwen3",
}


def family_of(raw: Raw) -> Family:
    """Return the family of a `config.json`. Raises ValueError if it is not supported."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    kind = FAMILIES.get(name) if isinstance(name, str) else None
    if kind is None:
        supported = ", ".join(FAMILIES)
        raise ValueError(f"architectures={shown(name)} is not supported; use one of {supported}.")
    if isinstance(kind, str):
        file, class_name = kind.split(".")
        kind = getattr(import_module(f".{file}", __name__), class_name)
    family: Family = kind()
    return family


def config_of(raw: Raw) -> ModelConfig:
    """Translate the content of a `config.json`. Raises ValueError for unsupported values."""
    return family_of(raw).config(raw)


def read_config(folder: str | Path) -> tuple[Family, ModelConfig]:
    """Read `config.json` in `folder`. Raises FileNotFoundError, or ValueError for unsupported values."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; a model folder needs a config.json.")
    raw = read_json(path)
    with errors_of(path):
        return family_of(raw), config_of(raw)


def build_config(raw: Raw, *, act: str = "silu", act_key: str = "hidden_act", **fields: Any) -> ModelConfig:
    """Return a config from the keys that all families share and `fields`, which take precedence. `act` is
    the only supported value of `raw[act_key]`, as named by transformers."""
    if (given := raw.get(act_key) or act) != act:
        raise ValueError(f"{act_key}={shown(given)} is not supported; only {act!r} is.")
    hidden_size, num_heads = get_value(raw, "hidden_size", int), get_value(raw, "num_attention_heads", int)
    num_layers = get_value(raw, "num_hidden_layers", int)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    same_names = "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"
    common = {
        **{name: get_value(raw, name, int) for name in same_names},
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": get_value(raw, "num_key_value_heads", int, num_heads),
        "head_dim": get_value(raw, "head_dim", int, hidden_size // num_heads),
        "windows": (None,) * num_layers,
        "rms_norm_eps": get_value(raw, "rms_norm_eps", float),
        "tie_word_embeddings": get_value(raw, "tie_word_embeddings", bool, False),
        "dtype": dtype.removeprefix("torch."),
    }
    return ModelConfig(**{**common, "rope": fields.get("rope") or parse_rope(raw), **fields})


def get_value(raw: Raw, key: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of a key, or the default if it is missing or null. Numbers must be positive. Raises
    ValueError for other values, and for a missing key without a default."""
    result = default if raw.get(key) is None else raw[key]
    if result is None:
        raise ValueError(f"{key!r} is missing.")
    if kind is bool:
        if type(result) is not bool:
            raise ValueError(f"{key}={shown(result)} must be true or false.")
        return result
    low, high = (1e-30, 1e30) if kind is float else (1, MOST.get(key, 2**31 - 1))
    return kind(check_number(key, result, low, high, kind))


def get_number(raw: Raw, key: str, default: float | None = None) -> float | None:
    """Return the number of a key, None if it is null, or the default if the key is missing."""
    number = raw.get(key, default)
    return None if number is None else get_value({key: number}, key, float)


def layer_windows(raw: Raw, window: int | None, has_window: Callable[[int], bool]) -> Windows:
    """Return the sliding window of each layer, or None. Layer i has a window according to entry i of
    `layer_types` or, without that list, to `has_window(i)`."""
    num_layers, kinds = get_value(raw, "num_hidden_layers", int), raw.get("layer_types")
    if kinds is None:
        return tuple(window if has_window(i) else None for i in range(num_layers))
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers.")
    by_kind = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    if unknown := [kind for kind in kinds if kind not in list(by_kind)]:
        raise ValueError(
            f"Layer type {shown(unknown[0])} is not supported; use full_attention, or sliding_attention with "
            "use_sliding_window and sliding_window set."
        )
    return tuple(by_kind[kind] for kind in kinds)


def parse_rope(raw: Raw, theta: float = 10000.0, partial: bool = False) -> Rope:
    """Return RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters` (transformers 5). `partial`
    is whether the family supports heads that are only partly rotated."""
    given = rope_entry(raw)
    part = get_value({**raw, **given}, "partial_rotary_factor", float, 1.0)
    if part > 1 or (part < 1 and not partial):
        raise ValueError(f"partial_rotary_factor={part} is not supported for this architecture.")
    theta = get_value(given, "rope_theta", float, get_value(raw, "rope_theta", float, theta))
    kind = given.get("rope_type", given.get("type", "default"))
    # The context length of pretraining, in transformers' order: top-level key, RoPE entry, maximum.
    longest, key = get_value(raw, "max_position_embeddings", int), "original_max_position_embeddings"
    length = get_value(raw, key, int, get_value(given, key, int, longest))
    match kind:
        case "default":
            return Rope(theta=theta, part=part)
        case "linear":
            return Rope("linear", theta, factor=get_value(given, "factor", float), part=part)
        case "llama3":
            low, high = (get_value(given, f"{end}_freq_factor", float) for end in ("low", "high"))
            if low >= high:
                raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}.")
            return Rope("llama3", theta, get_value(given, "factor", float), low, high, length, part)
        case "longrope":
            if length == 1:
                raise ValueError(f"{key}=1 must be at least 2 for longrope.")
            factor = get_value(given, "factor", float, longest / length)
            amplitude = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length))
            amplitude = get_number(given, "attention_factor") or amplitude
            short, long = (
                tuple(get_value({name: factor}, name, float) for factor in given[name])
                for name in ("short_factor", "long_factor")
            )
            rope = Rope("longrope", theta, original_max_len=length, part=part, amplitude=amplitude)
            return replace(rope, short_factors=short, long_factors=long)
    raise ValueError(f"RoPE type {shown(kind)} is not supported; use default, linear, llama3 or longrope.")


def rope_entry(raw: Raw) -> dict[str, Any]:
    """Return the object with the RoPE parameters other than theta, or {}."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given: dict[str, Any] = raw.get(name) or {}
    if any(isinstance(entry, dict) for entry in given.values()):
        raise ValueError(f"{name} with one RoPE per layer type is not supported; use one for all layers.")
    return given
