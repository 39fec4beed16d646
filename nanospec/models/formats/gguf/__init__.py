"""GGUF files, the format of llama.cpp: use one as a checkpoint, or convert it to a model folder.

`model_folder` writes a model folder with a link to the file instead of weights, which `GGUFCheckpoint` reads.
"""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ....kernels.layer.quantized import Quantized
from ....kernels.native import cache_folder
from ....text.files import errors_of
from ....text.validation import shown
from ...config import DTYPES
from ...families import config_of
from .file import ARCHITECTURES, GGUFCheckpoint, stamp
from .tokenizer import build_tokenizer, end_ids, token_id, tokenizer_config

LINK = "model.gguf"  # in a folder that `model_folder` writes
VERSION = 3  # of the content of these folders; increment it when that changes


def model_folder(source: Path) -> Path:
    """Return a model folder for a GGUF file in the cache: an earlier one if the file has not changed, else a
    new one. Raises OSError or ValueError."""
    source = source.absolute()
    state = repr((str(source), *stamp(source), VERSION))
    cache = cache_folder() / "gguf"
    folder = cache / hashlib.sha256(state.encode()).hexdigest()[:16] / source.stem
    if (folder / LINK).is_symlink():
        return folder
    files = folder_files(GGUFCheckpoint(source), "bfloat16")
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=cache) as scratch:
        write_files(Path(scratch) / source.stem, files)
        (Path(scratch) / source.stem / LINK).symlink_to(source)
        with suppress(OSError):  # if another process was faster
            os.rename(scratch, folder.parent)
    return folder


def convert(source: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Convert the GGUF file `source` to a new model folder, with weights in `dtype`. Raises ValueError. An
    error leaves the folder incomplete, so callers use a temporary one and rename it afterwards."""
    checkpoint = GGUFCheckpoint(source)
    write_files(folder, folder_files(checkpoint, dtype))
    weights = dict[str, Tensor]()
    for name in checkpoint.tensors:
        weight = checkpoint.get(name).to("cpu", DTYPES[dtype])
        weights[name] = weight.dequantize() if isinstance(weight, Quantized) else weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_files(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def folder_files(checkpoint: GGUFCheckpoint, dtype: str) -> dict[str, str]:
    """Return the contents of the text files of a model folder, whose config.json names `dtype`."""
    with errors_of(checkpoint.path):
        fields, config = checkpoint.fields, model_config(checkpoint, dtype)
        config_of(config)  # raises if the result could not be loaded
        ends = {"eos_token_id": end_ids(fields), "pad_token_id": token_id(fields, "padding")}
        contents = {
            "config.json": config,
            "generation_config.json": {"bos_token_id": config["bos_token_id"], **ends},
            "tokenizer_config.json": tokenizer_config(fields),
        }
        files = {"tokenizer.json": build_tokenizer(fields).to_str(pretty=True)}
        for name, content in contents.items():
            kept = {key: value for key, value in content.items() if value is not None}
            files[name] = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
        if template := fields.get("tokenizer.chat_template"):
            files["chat_template.jinja"] = str(template)
        return files


def model_config(checkpoint: GGUFCheckpoint, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`. Raises ValueError for unsupported features."""
    fields, get = checkpoint.fields, checkpoint.fields.hparam
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    only = {"expert_count": 0, "rope.dimension_count": head_dim}
    only |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}  # without a type, scaling is linear
    for key, supported in only.items():
        if (value := get(key, supported)) != supported:
            raise ValueError(f"{key}={shown(value)} is not supported; only {shown(supported)} is.")
    rope: dict[str, Any] | None = None
    if factors := checkpoint.rope_factors:  # Llama 3 stores a divisor per pair, as longrope has
        rope = {"rope_type": "longrope", "factor": 1.0, "short_factor": factors, "long_factor": factors}
    return {
        "architectures": [ARCHITECTURES[checkpoint.architecture]],
        "model_type": checkpoint.architecture,
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in checkpoint.tensors,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": rope,
        "vocab_size": checkpoint.tensors["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in checkpoint.tensors,
        "bos_token_id": token_id(fields, "bos"),
        "eos_token_id": next(iter(end_ids(fields)), None),
        "torch_dtype": dtype,
    }
