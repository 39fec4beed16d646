"""What `config.json` says about a model: one frozen `ModelConfig` for the whole Llama family.

Everything that `decoder.py` can vary is a field here, so that no other file asks which family it runs.
A config that would need something else (another architecture, RoPE variant, activation or a quantized
checkpoint) is refused with one sentence, never run approximately.

    LlamaForCausalLM    Llama 1, 2, 3.x, SmolLM2
    MistralForCausalLM  every layer sees a sliding window, if `sliding_window` is set
    Qwen2ForCausalLM    bias on q, k, v; windows on chosen layers
    Qwen3ForCausalLM    RMSNorm per head on q and k; windows on chosen layers

Values that a file may leave out get the default of that family.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from .rope import Rope

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = {int: "a positive integer", float: "a positive number", bool: "true or false"}
T = TypeVar("T", bool, int, float)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder.

    Attributes:
        qkv_bias, o_bias, mlp_bias: whether the projections (mlp: all three) have a bias.
        qk_norm: RMSNorm over each head of q and k before the rotation.
        windows: one per layer; w lets a token see itself and the w - 1 before it, None all of them.
        tie_word_embeddings: the output head is the embedding table.
        dtype: "float32", "bfloat16" or "float16", what the checkpoint says it is stored in.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        heads, kv, layers = self.num_heads, self.num_kv_heads, self.num_layers
        if heads % kv:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, as RoPE rotates pairs.")
        if (given := len(self.windows)) != layers:
            raise ValueError(f"There must be one attention window for each of {layers} layers, not {given}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}.")

    @classmethod
    def from_path(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` in `folder`. Raises FileNotFoundError or ValueError."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; a model folder needs a config.json.")
        raw = read_json(path)
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Translate the content of a `config.json`. Raises ValueError for what is not supported."""
        family = _family(raw)
        hidden_size, num_heads = _value(raw, "hidden_size", int), _value(raw, "num_attention_heads", int)
        num_layers = _value(raw, "num_hidden_layers", int)
        attention_bias = family in (LLAMA, QWEN3) and _value(raw, "attention_bias", bool, False)
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        return cls(
            vocab_size=_value(raw, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_value(raw, "intermediate_size", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_value(raw, "num_key_value_heads", int, num_heads),
            head_dim=_value(raw, "head_dim", int, 128 if family == QWEN3 else hidden_size // num_heads),
            max_position_embeddings=_value(raw, "max_position_embeddings", int),
            windows=_windows(raw, family, num_layers),
            rms_norm_eps=_value(raw, "rms_norm_eps", float),
            rope=_rope(raw),
            qkv_bias=family == QWEN2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == LLAMA and _value(raw, "mlp_bias", bool, False),
            qk_norm=family == QWEN3,
            tie_word_embeddings=_value(raw, "tie_word_embeddings", bool, False),
            dtype=str(dtype).removeprefix("torch."),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its Hugging Face name, in order of use."""
        H, I, D = self.hidden_size, self.intermediate_size, self.head_dim  # noqa: E741
        q, kv = self.num_heads * D, self.num_kv_heads * D
        head_norms = [("self_attn.q_norm", (D,), False), ("self_attn.k_norm", (D,), False)]
        layer: list[tuple[str, tuple[int, ...], bool]] = [  # name, shape of the weight, has a bias
            ("input_layernorm", (H,), False),
            ("self_attn.q_proj", (q, H), self.qkv_bias),
            ("self_attn.k_proj", (kv, H), self.qkv_bias),
            ("self_attn.v_proj", (kv, H), self.qkv_bias),
            *(head_norms if self.qk_norm else []),
            ("self_attn.o_proj", (H, q), self.o_bias),
            ("post_attention_layernorm", (H,), False),
            ("mlp.gate_proj", (I, H), self.mlp_bias),
            ("mlp.up_proj", (I, H), self.mlp_bias),
            ("mlp.down_proj", (H, I), self.mlp_bias),
        ]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, H)}
        for i, (name, shape, bias) in itertools.product(range(self.num_layers), layer):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
        shapes["model.norm.weight"] = (H,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, H)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding table counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a ValueError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # malformed JSON or UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def _family(raw: Mapping[str, Any]) -> str:
    """The architecture; ValueError if the decoder cannot run it or what the config wants beside it."""
    names, supported = raw.get("architectures"), ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise ValueError(f"'architectures' is missing or not a list; supported are {supported}.")
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"Architecture {names[0]!r} is not supported; supported are {supported}.")
    if raw.get("quantization_config") is not None:
        raise ValueError(
            "Quantized checkpoints (with a quantization_config) are not supported; use the one "
            "stored in float32, bfloat16 or float16."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; only 'silu' is.")
    return str(names[0])


def _windows(raw: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. `sliding_window`: null means none, absent means 4096."""
    if family == LLAMA:
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096)
    if window is not None:
        window = _value(raw, "sliding_window", int, 4096)
    if family == MISTRAL:
        return (window,) * num_layers
    if not _value(raw, "use_sliding_window", bool, False):
        window = None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = 28 if raw.get("max_window_layers") is None else raw["max_window_layers"]
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ValueError(f"max_window_layers={first!r} must be an integer of at least 0.")
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"'layer_types' must be a list of {num_layers} entries, one per layer.")
    sees = {"full_attention": None, "sliding_attention": window}
    unknown = [kind for kind in kinds if kind not in list(sees)]
    if unknown:
        raise ValueError(f"Layer type {unknown[0]!r} is not supported; supported are {' and '.join(sees)}.")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(
            "'layer_types' has sliding_attention, but use_sliding_window or sliding_window is not set; set "
            "both, or make the layers full_attention."
        )
    return tuple(sees[kind] for kind in kinds)


def _rope(raw: Mapping[str, Any]) -> Rope:
    """RoPE from `rope_theta` with `rope_scaling`, or from `rope_parameters` (transformers 5)."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{name}={given!r} must be an object.")
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{name} holds one RoPE per kind of layer; only one for all is supported.")
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1):
        raise ValueError("A partial_rotary_factor other than 1 is not supported.")
    theta = _value(given, "rope_theta", float, _value(raw, "rope_theta", float, 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    match kind:
        case "default":
            return Rope(theta=theta)
        case "linear":
            return Rope("linear", theta, factor=_value(given, "factor", float))
        case "llama3":
            low, high = _value(given, "low_freq_factor", float), _value(given, "high_freq_factor", float)
            if low >= high:
                raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}.")
            # In Hugging Face's order: beside the RoPE entry, in it, or the context length itself.
            length, key = _value(raw, "max_position_embeddings", int), "original_max_position_embeddings"
            length = _value(raw, key, int, _value(given, key, int, length))
            return Rope("llama3", theta, _value(given, "factor", float), low, high, length)
    raise ValueError(f"RoPE type {kind!r} is not supported; default, linear and llama3 are.")


def _value(raw: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """The value of a key, which must be one of `KINDS`; where it is absent or null, the default."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ValueError(f"{key!r} is missing.")
    fits = type(value) is bool if kind is bool else type(value) in (int, kind) and 0 < value < math.inf
    if not fits:
        raise ValueError(f"{key}={value!r} must be {KINDS[kind]}.")
    return kind(value)
