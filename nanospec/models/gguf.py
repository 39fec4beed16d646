"""Convert a GGUF file into a model folder that nanospec, vLLM and transformers can load.

Quantized tensors are expanded, which does not change their quality. llama.cpp reorders the q and k rows of
the llama architecture (not of qwen2) for interleaved RoPE; `hf_values` restores the order of Hugging Face.
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

from ..text import reason, shown
from .config import DTYPES
from .families import config_of

try:
    import gguf
except ModuleNotFoundError as missing:
    raise ImportError("reading GGUF files needs the gguf library: pip install gguf.") from missing

STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # dtype -> what safetensors calls it
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

# How text is cut before byte-pair merging, by the value of `tokenizer.ggml.pre`.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    "qwen2": pre_tokenizers.Split(tokenizers.Regex(rf"{WORDS}|\p{{N}}|{OTHERS}"), "isolated"),
    "llama-bpe": pre_tokenizers.Split(tokenizers.Regex(rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}"), "isolated"),
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # `tokenizer.ggml.token_type`
# A GGUF file names one end token; as in llama.cpp, control tokens of these names end a text too.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


class ConversionError(ValueError):
    """The file cannot be converted; the message says why."""


class Reader(gguf.GGUFReader):
    """The library's reader, with an error at the end of a file instead of a loop over a broken length."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **named: Any) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, *more, **named)


class GGUFFile(dict[str, Any]):
    """Metadata of a GGUF file by key, and its `tensors`. Raises ConversionError."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConversionError("it does not exist; give the path of a GGUF file.")
        reader = Reader(path)
        super().__init__((key, field.contents()) for key, field in reader.fields.items())
        self.tensors = reader.tensors
        self.architecture: str = self["general.architecture"]
        if self.architecture not in ARCHITECTURES:
            said = f"it holds a model of architecture {shown(self.architecture)}"
            raise ConversionError(f"{said}; this converter knows {' and '.join(ARCHITECTURES)}.")

    def __missing__(self, key: str) -> NoReturn:
        raise ConversionError(f"it lacks the field {key!r}, which is needed.")

    def hparam(self, key: str, default: Any = None) -> Any:
        """Return `ARCHITECTURE.key`, or `default`; without a default a missing key is an error."""
        key = f"{self.architecture}.{key}"
        value = self[key] if default is None else self.get(key, default)
        # A float32 as the short decimal that it stands for: 9.99999974e-06 is 1e-05.
        return float(f"{value:.6g}") if isinstance(value, float) else value

    def token_id(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as "bos"."""
        return self.get(f"tokenizer.ggml.{name}_token_id")

    def vocabulary(self) -> list[tuple[str, int]]:
        """Return all tokens with their types, by id."""
        tokens = self["tokenizer.ggml.tokens"]
        types = self.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        return list(zip(tokens, types, strict=True))

    def end_ids(self) -> list[int]:
        """Return the ids at which generation ends, the file's own end token first."""
        ids = {token: i for i, (token, kind) in enumerate(self.vocabulary()) if kind == CONTROL}
        ends = [*map(self.token_id, ("eos", "eot", "eom")), *map(ids.get, END_TOKENS)]
        return list(dict.fromkeys(i for i in ends if i is not None))


def hf_name(name: str) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        hint = " (it scales RoPE)" if name == "rope_freqs.weight" else ""
        raise ConversionError(f"it holds a tensor {shown(name)}, which cannot be converted{hint}.")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """Return the contents of `config.json`. Raises ConversionError for what it cannot express."""
    num_heads, hidden_size = file.hparam("attention.head_count"), file.hparam("embedding_length")
    head_dim = file.hparam("attention.key_length", hidden_size // num_heads)
    if file.hparam("expert_count", 0):
        raise ConversionError("mixture-of-experts models cannot be converted; use a dense one.")
    if (scaling := file.hparam("rope.scaling.type", "none")) != "none":
        raise ConversionError(f"RoPE scaling {shown(scaling)} cannot be converted; use a model without.")
    if (dim := file.hparam("rope.dimension_count", head_dim)) != head_dim:
        raise ConversionError(f"RoPE covers {shown(dim)} of {shown(head_dim)} dimensions of a head, not all.")
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
    """Return the byte-level BPE tokenizer that the metadata describe."""
    kind, pre = file["tokenizer.ggml.model"], file.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ConversionError(
            f"the tokenizer is {shown(kind)} with pre-tokenizer {shown(pre)}; this converter knows 'gpt2' "
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
    # In the order of their ids, and each already in `vocab`, so that they keep those ids.
    for token, kind in tokens:
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)])
    return tokenizer


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`."""
    tokens = file["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": file.token_id(key) for name, key in special.items()}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**config, "model_max_length": file.hparam("context_length"), **named}


def write_safetensors(file: GGUFFile, path: Path, dtype: str) -> None:
    """Write all tensors into one safetensors file, one by one: a header of offsets, then the bytes in order.
    The `safetensors` library would need all of them in memory at once."""
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
    """Return a tensor of the file in float32 and in the Hugging Face layout."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    num_heads, kind = file.hparam("attention.head_count"), tensor.name.split(".")[-2]
    heads = {"attn_q": num_heads, "attn_k": file.hparam("attention.head_count_kv", num_heads)}
    if file.architecture == "llama" and kind in heads:
        # Within a head, rows (0, 1, 2, 3, ...) of the file are rows (0, D/2, 1, D/2 + 1, ...) here.
        split = values.reshape(heads[kind], -1, 2, *values.shape[1:])  # [H, D/2, 2, ...]
        values = split.swapaxes(1, 2).reshape(values.shape)
    return np.require(values, requirements=["C", "W"])  # copies only where it must


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, without entries that are None."""
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write the model in the GGUF file `source` into `folder`, which must not exist yet. Raises
    ConversionError. Callers give a scratch folder and rename it when `convert` returns."""
    try:
        file = GGUFFile(source)
        config, tokenizer = model_config(file, dtype), build_tokenizer(file)
        config_of(config)  # refuses what could not be loaded
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
    except Exception as error:  # it is cut off, fields have other types or contradict each other
        said = f"{source} cannot be converted ({type(error).__name__}: {reason(error)})"
        raise ConversionError(f"{said}: it is not a GGUF file, or damaged; fetch it again.") from error
