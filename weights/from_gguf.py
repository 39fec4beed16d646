"""Convert a GGUF file into a model folder that nanospec, vLLM and transformers can load.

    python weights/from_gguf.py IN.gguf OUT_DIR [--dtype bfloat16]

OUT_DIR then holds `model.safetensors`, `config.json`, `generation_config.json`, `tokenizer.json`,
`tokenizer_config.json` and, when the file carries one, `chat_template.jinja`.

What a reader should know:

* Quantised tensors are expanded to `--dtype`. Nothing is gained in quality: a 4-bit model stays a
  4-bit model, only stored wide.
* llama.cpp stores the q and k rows of the llama architecture reordered for interleaved RoPE.
  `unpermute` puts them back into the order of Hugging Face ("rotate half"). qwen2 is not reordered.
* The output is streamed tensor by tensor into one safetensors file, so that the memory needed is
  that of the largest tensor, not of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm

try:
    import gguf
except ModuleNotFoundError as missing:
    raise SystemExit("Reading GGUF files needs the gguf library: pip install gguf.") from missing

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

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
SPLIT_PATTERNS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PRE_TOKENIZERS = ("smollm", *SPLIT_PATTERNS)

# `tokenizer.ggml.token_type`
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# A GGUF file names one end token; a chat model usually has a second one. Like llama.cpp, we also
# stop at control tokens with these names.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


class ConversionError(ValueError):
    """The file cannot be converted; the message says what is wrong and what would help."""


class GGUFFile:
    """Metadata and tensors of a GGUF file, with errors a user understands."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConversionError(f"{path} does not exist; give the path of a GGUF file.")
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader fails in many ways, none of which says "truncated"
            raise ConversionError(
                f"{path} cannot be read as GGUF ({error}): it is not a GGUF file or the download "
                "is incomplete; fetch it again."
            ) from error
        self.path = path
        self.architecture: str = self.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ConversionError(
                f"{path} holds a model of architecture {self.architecture!r}; this converter knows "
                f"{' and '.join(ARCHITECTURES)}."
            )

    def get(self, key: str, default: Any = ...) -> Any:
        """Value of `key`, or `default`; without a default a missing key is an error."""
        field = self.reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is ...:
            raise ConversionError(f"the GGUF file lacks the field {key!r}, which is needed.")
        return default

    def hparam(self, key: str, default: Any = ...) -> Any:
        """Value of `ARCHITECTURE.key`."""
        return self.get(f"{self.architecture}.{key}", default)

    def tensor_names(self) -> set[str]:
        """Names of all tensors, as the GGUF file spells them."""
        return {tensor.name for tensor in self.reader.tensors}


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of q/k rows: interleaved RoPE pairs back to halves.

    `rows` is [num_heads * head_dim, ...]; within a head, rows (0, 1, 2, 3, ...) of the file are
    rows (0, D/2, 1, D/2 + 1, ...) of the Hugging Face layout.
    """
    split = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, D/2, 2, ...]
    return split.swapaxes(1, 2).reshape(rows.shape)


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        hint = (
            " (it scales RoPE, which a GGUF file does not describe well enough to convert)"
            if name == "rope_freqs.weight"
            else ""
        )
        raise ConversionError(f"the GGUF file holds a tensor {name!r} of unknown meaning{hint}.")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """The contents of `config.json`."""
    if file.hparam("expert_count", 0):
        raise ConversionError("mixture-of-experts models cannot be converted; use a dense one.")
    scaling = file.hparam("rope.scaling.type", "none")
    if scaling != "none":
        raise ConversionError(f"RoPE scaling {scaling!r} cannot be converted; use a model without.")
    names = file.tensor_names()
    shapes = {tensor.name: tensor.shape for tensor in file.reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ConversionError("the GGUF file lacks the tensor 'token_embd.weight'.")
    num_heads = file.hparam("attention.head_count")
    hidden_size = file.hparam("embedding_length")
    head_dim = file.hparam("attention.key_length", hidden_size // num_heads)
    rotary_dim = file.hparam("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ConversionError(
            f"RoPE covers {rotary_dim} of {head_dim} dimensions of a head; only whole heads work."
        )
    end_ids = end_token_ids(file)
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
        "rms_norm_eps": clean_float(file.hparam("attention.layer_norm_rms_epsilon")),
        "rope_theta": clean_float(file.hparam("rope.freq_base", 10000.0)),
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": end_ids[0] if end_ids else None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if file.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = False
    return config


def clean_float(value: float) -> float:
    """The short decimal that a float32 stands for: 9.99999974e-06 -> 1e-05."""
    return float(f"{value:.6g}")


def end_token_ids(file: GGUFFile) -> list[int]:
    """Ids at which generation ends, the file's own end token first."""
    named = [file.get(f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot", "eom")]
    tokens, types = vocabulary(file)
    ids = {token: i for i, token in enumerate(tokens) if types[i] == CONTROL}
    named += [ids.get(token) for token in END_TOKENS]
    return list(dict.fromkeys(i for i in named if i is not None))


def vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    """All tokens and their types, by id."""
    tokens = file.get("tokenizer.ggml.tokens")
    return tokens, file.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))


def build_tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer described by the file's metadata."""
    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ConversionError(
            f"the tokenizer is {kind!r} with pre-tokenizer {pre!r}; this converter knows 'gpt2' "
            f"(byte-level BPE) with {', '.join(PRE_TOKENIZERS)}."
        )
    tokens, types = vocabulary(file)
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    if pre == "smollm":
        cut: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        pattern = tokenizers.Regex(SPLIT_PATTERNS[pre])
        cut = pre_tokenizers.Split(pattern, behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    bos_id = file.get("tokenizer.ggml.bos_token_id", None)
    if bos_id is not None and file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    # In the order of their ids, and each already in `vocab`, so that they keep those ids.
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(tokens[i], special=kind == CONTROL, normalized=False)
            for i, kind in enumerate(types)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`."""
    tokens, _ = vocabulary(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.hparam("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", None)
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    return config


def hf_tensors(file: GGUFFile, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each tensor in the Hugging Face layout, one at a time."""
    heads = {
        "attn_q": file.hparam("attention.head_count"),
        "attn_k": file.hparam("attention.head_count_kv", file.hparam("attention.head_count")),
    }
    for tensor in file.reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if file.architecture == "llama" and kind in heads:
            values = unpermute(values, heads[kind])
        values = np.require(values, requirements=["C", "W"])  # copies only where it must
        yield hf_name(tensor.name), torch.from_numpy(values).to(DTYPES[dtype])


def write_safetensors(file: GGUFFile, path: Path, dtype: str) -> None:
    """Stream all tensors into one safetensors file: a header of offsets, then the bytes in order.

    The `safetensors` library wants all tensors in memory at once; the format itself does not.
    """
    width = torch.finfo(DTYPES[dtype]).bits // 8
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in file.reader.tensors:
        begin, end = end, end + int(tensor.n_elements) * width
        header[hf_name(tensor.name)] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": [int(n) for n in reversed(tensor.shape)],
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with (
        path.open("wb") as out,
        tqdm(total=end, unit="B", unit_scale=True, desc="converting", disable=None) as bar,
    ):
        out.write(len(raw).to_bytes(8, "little") + raw)
        for _, values in hf_tensors(file, dtype):
            bar.update(out.write(values.view(-1).view(torch.uint8).numpy().data))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, without entries that are None."""
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write the model in the GGUF file `source` into `folder`, which must not exist yet.

    Raises ConversionError for a file that cannot be converted. What was written until an error
    stays: callers give a scratch folder and rename it when `convert` returns.
    """
    if dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    file = GGUFFile(source)
    config, tokenizer = model_config(file, dtype), build_tokenizer(file)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": end_token_ids(file),
            "pad_token_id": file.get("tokenizer.ggml.padding_token_id", None),
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    template = file.get("tokenizer.chat_template", None)
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_safetensors(file, folder / "model.safetensors", dtype)


def publish(folder: Path, target: Path) -> None:
    """Move the finished `folder` to `target` on the same disk, replacing what is there."""
    if target.exists():
        shutil.rmtree(target)
    os.rename(folder, target)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path, metavar="IN.gguf")
    parser.add_argument("target", type=Path, metavar="OUT_DIR")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace OUT_DIR if it exists")
    args = parser.parse_args(argv)
    if args.target.exists() and not args.force:
        print(f"{args.target} exists already; give another folder or --force.", file=sys.stderr)
        return 1
    try:
        args.target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=args.target.parent) as scratch:
            convert(args.source, Path(scratch) / "model", args.dtype)
            publish(Path(scratch) / "model", args.target)
    except (ConversionError, OSError) as error:
        print(f"Cannot convert {args.source}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was changed.", file=sys.stderr)
        return 130
    print(f"{args.target} is ready.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
