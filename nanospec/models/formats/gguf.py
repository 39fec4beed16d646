"""Convert a GGUF file to a model folder that nanospec, vLLM and transformers can load.

Quantized tensors are dequantized, which keeps their quality. For the llama architecture (not for qwen2),
llama.cpp reorders rows of q and k for interleaved RoPE; `hf_values` restores the order of Hugging Face.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm

from ...text import reason, shown
from ..config import DTYPES
from ..families import config_of

try:
    import gguf
except ModuleNotFoundError as missing:
    raise ImportError("reading GGUF files needs the gguf library: pip install gguf.") from missing

STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # dtype -> its name in safetensors
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Pre-tokenizers by the value of `tokenizer.ggml.pre`; they split text before byte-pair merging.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    "qwen2": pre_tokenizers.Split(tokenizers.Regex(rf"{WORDS}|\p{{N}}|{OTHERS}"), "isolated"),
    "llama-bpe": pre_tokenizers.Split(tokenizers.Regex(rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}"), "isolated"),
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # `tokenizer.ggml.token_type`
# A GGUF file names a single end token; as in llama.cpp, control tokens with these names also end a text.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


class ConversionError(ValueError):
    """Raised if a file cannot be converted; the message gives the reason."""


class Reader(gguf.GGUFReader):
    """The library's reader, with an error at the end of the file instead of a loop over a corrupt length."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **named: Any) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("unexpected end of file")
        return super()._get(offset, dtype, count, *more, **named)


class GGUFFile(dict[str, Any]):
    """The metadata of a GGUF file by key, and its `tensors`. A missing key raises ConversionError."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConversionError("file not found; specify the path of a GGUF file.")
        reader = Reader(path)
        super().__init__((key, field.contents()) for key, field in reader.fields.items())
        self.tensors = reader.tensors
        self.architecture: str = self["general.architecture"]
        if self.architecture not in ARCHITECTURES:
            problem = f"architecture {shown(self.architecture)} is not supported"
            raise ConversionError(f"{problem}; use {' or '.join(ARCHITECTURES)}.")

    def __missing__(self, key: str) -> NoReturn:
        raise ConversionError(f"the required field {key!r} is missing.")

    def hparam(self, key: str, default: Any = None) -> Any:
        """Return the field `ARCHITECTURE.key`, or `default`. Without a default, it must be present."""
        key = f"{self.architecture}.{key}"
        value = self[key] if default is None else self.get(key, default)
        # Rounds a float32 to the short decimal it was written as: 9.99999974e-06 to 1e-05.
        return float(f"{value:.6g}") if isinstance(value, float) else value

    def token_id(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as "bos"."""
        return self.get(f"tokenizer.ggml.{name}_token_id")

    def vocabulary(self) -> list[tuple[str, int]]:
        """Return (token, type) for each id."""
        tokens = self["tokenizer.ggml.tokens"]
        types = self.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        return list(zip(tokens, types, strict=True))

    def end_ids(self) -> list[int]:
        """Return the ids of end-of-sequence tokens, starting with the one that the file declares."""
        ids = {token: i for i, (token, kind) in enumerate(self.vocabulary()) if kind == CONTROL}
        ends = [*map(self.token_id, ("eos", "eot", "eom")), *map(ids.get, END_TOKENS)]
        return list(dict.fromkeys(i for i in ends if i is not None))


def hf_name(name: str) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        kind = "RoPE scaling tensor" if name == "rope_freqs.weight" else "tensor"
        raise ConversionError(f"{kind} {shown(name)} is not supported.")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`. Raises ConversionError for unsupported features."""
    num_heads, hidden_size = file.hparam("attention.head_count"), file.hparam("embedding_length")
    head_dim = file.hparam("attention.key_length", hidden_size // num_heads)
    if file.hparam("expert_count", 0):
        raise ConversionError("mixture-of-experts models are not supported; use a dense model.")
    if (scaling := file.hparam("rope.scaling.type", "none")) != "none":
        raise ConversionError(f"RoPE scaling {shown(scaling)} is not supported; use a model without scaling.")
    if (dim := file.hparam("rope.dimension_count", head_dim)) != head_dim:
        raise ConversionError(f"RoPE of {shown(dim)} of {shown(head_dim)} dimensions is not supported.")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    config = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "hidden_size": hidden_size,
        "intermediate_size": file.hparam("feed_forward_length"),
        "num_hidden_layers": file.hparam("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.hparam("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.hparam("context_length"),
        "rms_norm_eps": file.hparam("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.hparam("rope.freq_base", 10000.0),
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": next(iter(file.end_ids()), None),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if file.architecture == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": False}
    return config


def build_tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    """Build the byte-level BPE tokenizer described by the metadata."""
    kind, pre = file["tokenizer.ggml.model"], file.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ConversionError(
            f"tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not supported; available: 'gpt2' "
            f"(byte-level BPE) with {', '.join(PRE_TOKENIZERS)}."
        )
    tokens = file.vocabulary()
    vocab = {token: i for i, (token, kind) in enumerate(tokens) if kind != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in file["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([PRE_TOKENIZERS[pre], to_bytes])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    bos_id = file.token_id("bos")
    if bos_id is not None and file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = tokens[bos_id][0]
        begins = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
        tokenizer.post_processor = begins
    # Added tokens are already in `vocab`, so they keep their ids.
    for token, kind in tokens:
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)])
    return tokenizer


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    tokens = file["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": file.token_id(key) for name, key in special.items()}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**config, "model_max_length": file.hparam("context_length"), **named}


def write_safetensors(file: GGUFFile, path: Path, dtype: str) -> None:
    """Write all tensors to one safetensors file, one at a time: a header with offsets, then the data. The
    `safetensors` library would need all tensors in memory at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in file.tensors:
        begin, end = end, end + int(tensor.n_elements) * DTYPES[dtype].itemsize
        shape = [int(n) for n in reversed(tensor.shape)]
        header[hf_name(tensor.name)] = {"dtype": STORED[dtype], "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    bar = tqdm(total=end, unit="B", unit_scale=True, desc="converting", disable=None)
    with path.open("wb") as out, bar:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in file.tensors:
            values = torch.from_numpy(hf_values(file, tensor)).to(DTYPES[dtype])
            bar.update(out.write(values.view(-1).view(torch.uint8).numpy().data))


def hf_values(file: GGUFFile, tensor: Any) -> np.ndarray:
    """Return a tensor of the file in float32 and Hugging Face layout."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    num_heads, kind = file.hparam("attention.head_count"), tensor.name.split(".")[-2]
    heads = {"attn_q": num_heads, "attn_k": file.hparam("attention.head_count_kv", num_heads)}
    if file.architecture == "llama" and kind in heads:
        # Within a head, rows (0, 1, 2, 3, ...) of the file are rows (0, D/2, 1, D/2 + 1, ...) here.
        split = values.reshape(heads[kind], -1, 2, *values.shape[1:])  # [H, D/2, 2, ...]
        values = split.swapaxes(1, 2).reshape(values.shape)
    return np.require(values, requirements=["C", "W"])  # copies only if necessary


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, omitting entries that are None."""
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Convert the GGUF file `source` to a new model folder, with weights in `dtype`. Raises ConversionError.
    An error leaves the folder incomplete, so callers use a temporary one and rename it afterwards."""
    try:
        file = GGUFFile(source)
        config, tokenizer = model_config(file, dtype), build_tokenizer(file)
        config_of(config)  # raises if the result could not be loaded
        folder.mkdir(parents=True)
        write_json(folder / "config.json", config)
        ends = {"eos_token_id": file.end_ids(), "pad_token_id": file.token_id("padding")}
        write_json(folder / "generation_config.json", {"bos_token_id": config["bos_token_id"], **ends})
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer_config(file))
        if template := file.get("tokenizer.chat_template"):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        write_safetensors(file, folder / "model.safetensors", dtype)
    except (OSError, MemoryError):
        raise
    except ConversionError as error:
        raise ConversionError(f"{source}: {error}") from None
    except Exception as error:  # a truncated file, or fields of wrong types or with inconsistent values
        problem = f"{source} cannot be converted ({type(error).__name__}: {reason(error)})"
        raise ConversionError(f"{problem}: not a GGUF file, or corrupt; download it again.") from error
