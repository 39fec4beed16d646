"""A tiny model as a GGUF file in llama.cpp's layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import tiny_config

HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 4, 2, 2, 48
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TOKENS = [*SPECIAL, *"abcdefgh0123", "Ġ", "ab", "[PAD]"]
TYPES = [3, 3, 3, 4, *[1] * 14, 5]
VOCAB = len(TOKENS)
OFFSETS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of float16


def tensors(architecture: str, tied: bool, hidden_size: int, head_dim: int) -> dict[str, np.ndarray]:
    """Return random weights of a tiny model by Hugging Face name."""
    rng = np.random.default_rng(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden_size, "intermediate_size": INTERMEDIATE}
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": head_dim, "num_layers": LAYERS}
    kind = {"qkv_bias": architecture == "qwen2", "qk_norm": architecture == "qwen3"}
    shapes = tiny_config(**sizes, **heads, **kind, tie_word_embeddings=tied).parameter_shapes()
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def quantize(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return blocks of `values`, [N, bytes], or random ones if the library cannot quantize to `kind`."""
    if kind.name not in OFFSETS:
        return np.asarray(gguf.quants.quantize(values, kind))
    rng, (elements, size) = np.random.default_rng(len(values)), gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
    for at in OFFSETS[kind.name]:
        raw[:, at : at + 2] = (rng.standard_normal((len(raw), 1)) * 1e-3).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        raw[:, 193] = raw[:, 192]  # the first two groups have equal scales
    return raw.reshape(len(values), -1)


def stored_layout(name: str, values: np.ndarray) -> np.ndarray:
    """Permute rows of q and k as llama.cpp does for llama models (convert_hf_to_gguf.py)."""
    num_heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if num_heads is None:
        return values
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])  # [H, 2, D / 2, ...]
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tied: bool = True,
    pre: str = "smollm",
    edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    kind: str = "F32",
) -> dict[str, np.ndarray]:
    """Write a tiny model as a GGUF file and return its weights by Hugging Face name. Matrices are stored as
    `kind` if their rows are whole blocks."""
    block, _ = gguf.GGML_QUANT_SIZES[stored := gguf.GGMLQuantizationType[kind]]
    hidden_size, head_dim = max(32, block), 16 if architecture == "qwen3" else max(32, block) // HEADS
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "block_count": LAYERS, "context_length": 64, "embedding_length": hidden_size,
        "feed_forward_length": INTERMEDIATE, "head_count": HEADS, "head_count_kv": KV_HEADS,
        "rope_freq_base": 5000.0, "layer_norm_rms_eps": 1e-5, "tokenizer_model": "gpt2", "tokenizer_pre": pre,
        "token_list": TOKENS, "token_types": TYPES, "token_merges": ["a b"], "bos_token_id": 1,
        "eos_token_id": 2, "chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip
    if head_dim * HEADS != hidden_size:
        fields["key_length"] = head_dim
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    edit(writer)
    weights = tensors(architecture, tied, hidden_size, head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)
    for name, values in weights.items():
        raw_dtype = None
        if kind != "F32" and values.ndim == 2 and values.shape[1] % block == 0:
            raw_dtype, values = stored, quantize(values, stored)
            weights[name] = gguf.quants.dequantize(values, stored)
        if architecture == "llama":
            values = stored_layout(name, values)
        gguf_name = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        writer.add_tensor(gguf_name, values, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
