"""The shapes of some models, to ask what a step would cost without having them."""

from __future__ import annotations

from ...models.config import ModelConfig


def _shape(
    architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int,
    vocab: int, tied: bool, window: int = 40960,
) -> ModelConfig:  # fmt: skip
    return ModelConfig.from_dict(
        {
            "architectures": [architecture],
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "max_position_embeddings": window,
            "rms_norm_eps": 1e-6,
            "dtype": "bfloat16",
        }
    )


SHAPES = {
    "smollm2-135m": _shape("LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49152, True, 8192),
    "qwen3-0.6b": _shape("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "llama-3.2-1b": _shape("LlamaForCausalLM", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072),
    "qwen3-8b": _shape("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "llama-3.3-70b": _shape("LlamaForCausalLM", 8192, 28672, 80, 64, 8, 128, 128256, False, 131072),
}
