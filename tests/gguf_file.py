"""A tiny model as a GGUF file in llama.cpp's layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import tiny_config

HEADS, KV_HEADS, HEAD_DIM, LAYERS, INTERMEDIATE = 4, 2, 8, 2, 48
HIDDEN = HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TOKENS = [*SPECIAL, *"abcdefgh0123", "Ġ", "ab", "[PAD]"]
TYPES = [3, 3, 3, 4, *[1] * 14, 5]
VOCAB = len(TOKENS)
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)


def tensors(architecture: str, tied: bool) -> dict[str, np.ndarray]:
    """Return random weights of a tiny model by Hugging Face name."""
    rng = np.random.default_rng(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_layers": LAYERS}
    config = tiny_config(**sizes, **heads, qkv_bias=architecture == "qwen2", tie_word_embeddings=tied)
    shapes = config.parameter_shapes()
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def stored_layout(name: str, values: np.ndarray) -> np.ndarray:
    """Permute rows of q and k as llama.cpp does for llama models (convert_hf_to_gguf.py)."""
    num_heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if num_heads is None:
        return values
    halves = values.reshape(num_heads, 2, HEAD_DIM // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tied: bool = True,
    pre: str = "smollm",
    edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    quantized: bool = False,
) -> dict[str, np.ndarray]:
    """Write a tiny model as a GGUF file and return its weights by Hugging Face name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    edit(writer)
    weights = tensors(architecture, tied)
    for name, values in weights.items():
        stored = stored_layout(name, values) if architecture == "llama" else values
        gguf_name = str(NAMES.get_name(name, try_suffixes=(".weight", ".bias")))
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
