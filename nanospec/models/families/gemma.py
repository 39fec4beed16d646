"""Gemma 2 and Gemma 3 (text only): norms that multiply by 1 + w, before and after attention and MLP; GeGLU;
scaled embeddings. Gemma 2 has soft caps. Gemma 3 has norms of q and k, and local layers have their own RoPE.

https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2503.19786
"""

from typing import Any

from torch import Tensor

from ..config import ModelConfig, Rope
from . import Family, Raw, build_config, get_number, get_value, layer_windows, parse_rope

# Our names -> Gemma's. `post_attention_layernorm` is before the MLP in Llama, but after attention in Gemma.
NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "self_attn.out_norm": "post_attention_layernorm",
    "mlp.out_norm": "post_feedforward_layernorm",
}
DEFAULTS: dict[str, Any] = {  # from transformers; released config files omit them
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}


class Gemma2(Family):
    def config(self, raw: Raw) -> ModelConfig:
        raw = {**DEFAULTS, "vocab_size": 256000, "max_position_embeddings": 8192, **_given(raw)}
        return _read(
            raw,
            windows=layer_windows(raw, get_value(raw, "sliding_window", int), lambda i: i % 2 == 0),
            attention_softcap=get_number(raw, "attn_logit_softcapping", 50.0),
            logit_softcap=get_number(raw, "final_logit_softcapping", 30.0),
        )

    def stored_name(self, name: str) -> str:
        """Map a name to the checkpoint's. At most one part is replaced, since two names are swapped."""
        ours = next((part for part in NORMS if part in name), None)
        return name if ours is None else name.replace(ours, NORMS[ours])

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        return 1 + tensor.float() if name.endswith("norm.weight") else tensor


class Gemma3(Gemma2):
    def config(self, raw: Raw) -> ModelConfig:
        raw = {**DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, **_given(raw)}
        wide, local = _ropes(raw)
        window, n = get_value(raw, "sliding_window", int), get_value(raw, "sliding_window_pattern", int, 6)
        return _read(
            raw,
            windows=layer_windows(raw, window, lambda i: (i + 1) % n != 0),
            rope=wide,
            local_rope=local,
            qk_norm=True,
            logit_softcap=get_number(raw, "final_logit_softcapping"),
        )


class Gemma3WithImages(Gemma3):
    """The text model of a checkpoint that also supports images."""

    ignored = ("vision_tower.", "multi_modal_projector.")

    def config(self, raw: Raw) -> ModelConfig:
        shared = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
        return super().config({**raw["text_config"], **shared})

    def stored_name(self, name: str) -> str:
        return "language_model." + super().stored_name(name)


def _given(raw: Raw) -> dict[str, Any]:
    """Drop null values, which mean the default, except for soft caps, where null means none."""
    return {k: v for k, v in raw.items() if v is not None or k.endswith("softcapping")}


def _read(raw: Raw, **fields: Any) -> ModelConfig:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported; attention must be causal.")
    bias = get_value(raw, "attention_bias", bool, False)
    return build_config(
        raw,
        act="gelu_pytorch_tanh",
        act_key="hidden_activation",
        gate="gelu",
        out_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=get_value(raw, "hidden_size", int) ** 0.5,
        query_scalar=get_value(raw, "query_pre_attn_scalar", float),
        **fields,
    )


def _ropes(raw: Raw) -> tuple[Rope, Rope]:
    """Return RoPE of global and of local (sliding window) layers; transformers 5 has an entry for each."""
    nested: dict[str, Any] = raw.get("rope_parameters") or {}
    if raw.get("rope_scaling") or "full_attention" not in nested:
        return parse_rope(raw, 1e6), Rope(theta=get_value(raw, "rope_local_base_freq", float, 1e4))
    wide, local = ({**raw, "rope_parameters": nested.get(f"{key}_attention")} for key in ("full", "sliding"))
    return parse_rope(wide, 1e6), parse_rope(local, 1e4)
