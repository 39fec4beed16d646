"""Fuzz config.json: it must give a valid `ModelConfig` or an error message."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from nanospec.models.config import frequencies
from nanospec.models.families import FAMILIES, read_config

from .mutation import mutate_json as mutate  # noqa: F401
from .refusal import answer

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "mlp_bias": True,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.5}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": LLAMA3, "rope_theta": 1e5, "hidden_act": "silu"},
    "MistralForCausalLM": {"sliding_window": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": LLAMA3},
    "Phi3ForCausalLM": {"rope_scaling": LONG, "original_max_position_embeddings": 32},
    "Gemma2ForCausalLM": {"hidden_activation": "gelu_pytorch_tanh"},
    "Gemma3ForCausalLM": {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {}}},
    "Gemma3ForConditionalGeneration": {"text_config": {**SMALL, "sliding_window_pattern": 2}},
}
SEEDS = [json.dumps({"architectures": [name], **SMALL, **more}).encode() for name, more in KINDS.items()]


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "config.json").write_bytes(data)
        result = answer(read_config, folder)
    if result is not None:
        family, config = result
        assert len(family.stored_shapes(config)) <= len(family.places(config))
        assert config.attention_scale > 0
        for rope in (config.rope, config.local_rope):
            assert rope is None or frequencies(rope, config.head_dim, 64).isfinite().all()


assert set(KINDS) == set(FAMILIES)  # add a seed for each new family
