"""A tiny model as a GGUF file in llama.cpp's layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanospec.models.gguf import TENSOR_NAMES

HEADS, KV_HEADS, HEAD_DIM, LAYERS, INTERMEDIATE = 4, 2, 8, 2, 48
HIDDEN = HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TOKENS = [*SPECIAL, *"abcdefgh0123", "Ġ", "ab", "[PAD]"]
TYPES = [3, 3, 3, 4, *[1] * 14, 5]
VOCAB = len(TOKENS)
NAMES = {hf: name for name, hf in TENSOR_NAMES.items()}


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute q and k rows as llama.cpp does for llama models (convert_hf_to_gguf.py)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors(architecture: str, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights of a tiny model by Hugging Face name."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, columns in [
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ]:
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if architecture == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{layer}{name}.bias"] = (rows,)
        shapes[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


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
        stored = values
        if architecture == "llama" and "q_proj" in name:
            stored = permute(values, HEADS)
        if architecture == "llama" and "k_proj" in name:
            stored = permute(values, KV_HEADS)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            stored = gguf.quants.quantize(stored, kind)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
