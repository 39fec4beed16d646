"""GGUF files, the format of llama.cpp: use one as a checkpoint, or convert it to a model folder.

`model_folder` writes a model folder with a link to the file instead of weights, which `GGUFCheckpoint` reads.
For the llama architecture, llama.cpp reorders rows of q and k for interleaved RoPE; `GGUFCheckpoint` restores
the order of Hugging Face.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ....kernels.layer.quantized import Quantized
from ....text import shown
from ... import cache_folder
from ...config import DTYPES
from ...families import config_of
from .. import Shapes
from ..safetensors import check_fit
from .blocks import read
from .file import ARCHITECTURES, BLOCKS, GGUFError, GGUFFile, naming
from .tokenizer import build_tokenizer, end_ids, token_id, tokenizer_config

LINK = "model.gguf"  # in a folder that `model_folder` writes
VERSION = 1  # of the content of these folders; increment it when that changes
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # dtype -> its name in safetensors
ROWS = 1 << 13  # of a tensor that are dequantized at a time


class GGUFCheckpoint:
    """A checkpoint whose weights may be quantized. Raises FileNotFoundError or GGUFError."""

    def __init__(self, path: Path) -> None:
        path = path.parent / os.readlink(path) if path.is_symlink() else path  # for messages
        with naming(path):
            self.file = GGUFFile(path)

    def check(self, shapes: Shapes, is_ignored: Callable[[str], bool]) -> None:
        used = {name: tensor for name, tensor in self.file.tensors.items() if not is_ignored(name)}
        what = f"The weights in {self.file.path} do not fit its metadata"
        check_fit(used, shapes, what, dtypes=dict.fromkeys(shapes, tuple(BLOCKS)))

    def get(self, name: str, exact: bool = False) -> Tensor | Quantized:
        """With `exact`, see `blocks.read`."""
        with naming(self.file.path):
            tensor = read(self.file.path, self.file.tensors[name], exact)
            heads, kind = self.file.hparam("attention.head_count"), name.split(".")[-2]
            num_heads = {"q_proj": heads, "k_proj": self.file.hparam("attention.head_count_kv", heads)}
            if self.file.architecture != "llama" or kind not in num_heads:
                return tensor
            # Within a head, rows (0, 1, 2, 3, ...) of the file are rows (0, D/2, 1, D/2 + 1, ...) here.
            order = torch.arange(tensor.shape[0]).view(num_heads[kind], -1, 2).transpose(1, 2).flatten()
            return tensor.rows(order) if isinstance(tensor, Quantized) else tensor[order]


def model_folder(source: Path) -> Path:
    """Return a model folder for a GGUF file: an earlier one if the file has not changed, else a new one, in
    the user's cache or, if that is not writable, in a temporary folder of this process. Raises OSError or
    GGUFError."""
    source, status = source.absolute(), source.stat()
    state = repr((str(source), status.st_size, status.st_mtime_ns, VERSION))
    parent = cache_folder() / "gguf" / hashlib.sha256(state.encode()).hexdigest()[:16]
    with suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK):
        parent = Path(tempfile.mkdtemp(prefix="nanospec-"))
        atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / source.stem
    if _is_complete(folder, source):
        return folder
    with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as scratch, naming(source):
        new = Path(scratch) / "model"
        write_folder(GGUFFile(source), new, "bfloat16")
        (new / LINK).symlink_to(source)
        with suppress(OSError):
            os.rename(folder, Path(scratch) / "incomplete")
        with suppress(OSError):  # if another process was faster
            os.rename(new, folder)
    return folder


def _is_complete(folder: Path, source: Path) -> bool:
    files = all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    return files and os.path.realpath(folder / LINK) == os.path.realpath(source)


def convert(source: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Convert the GGUF file `source` to a new model folder, with weights in `dtype`. Raises GGUFError. An
    error leaves the folder incomplete, so callers use a temporary one and rename it afterwards."""
    checkpoint = GGUFCheckpoint(source)
    with naming(source):
        write_folder(checkpoint.file, folder, dtype)
    write_safetensors(checkpoint, folder / "model.safetensors", dtype)


def write_folder(file: GGUFFile, folder: Path, dtype: str) -> None:
    """Create a model folder without weights, whose config.json names `dtype`."""
    config, tokenizer = model_config(file, dtype), build_tokenizer(file)
    config_of(config)  # raises if the result could not be loaded
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    ends = {"eos_token_id": end_ids(file), "pad_token_id": token_id(file, "padding")}
    write_json(folder / "generation_config.json", {"bos_token_id": config["bos_token_id"], **ends})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    if template := file.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`. Raises GGUFError for unsupported features."""
    num_heads, hidden_size = file.hparam("attention.head_count"), file.hparam("embedding_length")
    head_dim = file.hparam("attention.key_length", hidden_size // num_heads)
    if file.hparam("expert_count", 0):
        raise GGUFError("mixture-of-experts models are not supported; use a dense model.")
    if (scaling := file.hparam("rope.scaling.type", "none")) != "none":
        raise GGUFError(f"RoPE scaling {shown(scaling)} is not supported; use a model without scaling.")
    if file.get("split.count", 1) > 1:
        raise GGUFError(
            "models in several files are not supported; merge them with llama-gguf-split --merge."
        )
    if (dim := file.hparam("rope.dimension_count", head_dim)) != head_dim:
        raise GGUFError(f"RoPE of {shown(dim)} of {shown(head_dim)} dimensions is not supported.")
    return {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "hidden_size": hidden_size,
        "intermediate_size": file.hparam("feed_forward_length"),
        "num_hidden_layers": file.hparam("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.hparam("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in file.tensors,
        "max_position_embeddings": file.hparam("context_length"),
        "rms_norm_eps": file.hparam("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.hparam("rope.freq_base", 10000.0),
        "vocab_size": file.tensors["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": next(iter(end_ids(file)), None),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, omitting entries that are None."""
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(checkpoint: GGUFCheckpoint, path: Path, dtype: str) -> None:
    """Write all tensors to one safetensors file, one at a time: a header with offsets, then the data. The
    `safetensors` library would need all tensors in memory at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in checkpoint.file.tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": STORED[dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    bar = tqdm(total=end, unit="B", unit_scale=True, desc="converting", disable=None)
    with path.open("wb") as out, bar:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in checkpoint.file.tensors.items():
            weight = checkpoint.get(name, exact=True)
            for first in range(0, tensor.shape[0], ROWS):
                rows = slice(first, first + ROWS)
                if isinstance(weight, Quantized):
                    part = weight.rows(rows).to("cpu", DTYPES[dtype]).dequantize()
                else:
                    part = weight[rows].to(DTYPES[dtype])
                bar.update(out.write(part.view(-1).view(torch.uint8).numpy().data))
