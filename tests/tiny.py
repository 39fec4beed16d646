"""Tiny models for tests.

* `tiny_model`: a model with random weights for the engine.
* `tiny_tokenizer`: bytes, and some longer tokens that cross JSON's syntax.
* `checkpoint`: a Hugging Face checkpoint written by `transformers` (a test dependency), with biases,
  norms, caps and RoPE that affect the output, one for each entry of `VARIANTS`.
* `ModelRunner`: runs a model without the engine, on a KV cache of random values with shuffled blocks."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from nanospec.kernels.batch import MAX_QUERIES, Batch, Chunk
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.table import Table
from nanospec.models.config import ModelConfig, Rope
from nanospec.models.decoder import Model
from nanospec.text.tokenizer import Tokenizer
from tests.random_weights import random_model


def tiny_config(**overrides: Any) -> ModelConfig:
    """Return the config of a two-layer decoder with a vocabulary of 64; `overrides` replace its fields."""
    fields: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 512, **overrides,
    }  # fmt: skip
    fields.setdefault("windows", (None,) * fields["num_layers"])
    return ModelConfig(**fields)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights; a tied embedding table counts once."""
    return sum(math.prod(shape) for shape in config.parameter_shapes().values())


def tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **overrides: Any
) -> Model:
    """Return a model of `tiny_config` with random weights."""
    return random_model(tiny_config(**overrides), dtype, device, seed)


def tiny_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer of 256 bytes, tokens of two to five bytes and EOS to the folder, and return it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = """" :|": Ġ|":Ġ "|, Ġ|,Ġ "|{ "|" }|} ]|[ {|t r|u e|tr ue|a b|ab ab|r e|re d|" red|g re|0 0|1 2"""
    merges = [(one, two) for one, two in (pair.split(" ") for pair in pairs.split("|"))]
    texts = ["<end>", *letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    return Tokenizer(folder)


# The features of Gemma 2 and 3, as fields of `tiny_config`.
GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 48, "windows": (9, None), "out_norms": True, "gate": "gelu", "query_scalar": 20,
        "attention_softcap": 1.5, "logit_softcap": 4.0, "embedding_scale": 5.5, "tie_word_embeddings": True,
    },
    "gemma3": {
        "hidden_size": 50, "head_dim": 40, "windows": (12, None), "local_rope": Rope(theta=100.0),
        "rope": Rope("linear", 1e6, factor=8.0), "out_norms": True, "gate": "gelu", "qk_norm": True,
        "embedding_scale": 7.0,
    },
}  # fmt: skip

_SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_THETA = {"rope_type": "default", "rope_theta": 100.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 12}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.7 * i for i in range(8)],
}  # fmt: skip
_GEMMA = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24}

# Name -> (family in transformers, differences from _SMALL).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mqa": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama-linear-biases-d24": ("Llama", {
        "rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
    }),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "mistral-window9": ("Mistral", {"sliding_window": 9}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window12-from1": ("Qwen2", {**_SLIDING, "max_window_layers": 1}),
    "qwen3-d32": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases-windows": ("Qwen3", {
        **_SLIDING, "head_dim": 16, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "phi3-window11": ("Phi3", {"sliding_window": 11, "pad_token_id": 0}),
    "phi3-longrope": ("Phi3", {
        "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32, "pad_token_id": 0,
    }),
    "phi3-partly-rotated": ("Phi3", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "hidden_size": 80, "tie_word_embeddings": True, "pad_token_id": 0,
    }),
    "gemma2-caps": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-biases": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": None, "attention_bias": True}),
    "gemma3": ("Gemma3", {
        **_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _THETA},
    }),
}  # fmt: skip


def checkpoint(
    folder: Path, variant: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:  # fmt: skip
    """Write the random checkpoint `variant`, with `changes` to its config, to `folder` and return it."""
    import transformers

    family, fields = VARIANTS[variant]
    torch.manual_seed(sorted(VARIANTS).index(variant))
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**{**_SMALL, **fields, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("norm.weight"):  # Gemma adds the 1 itself
                parameter.copy_((not family.startswith("Gemma")) + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference(folder: Path, ids: Tensor, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return the output of transformers for one sequence ids [T], by default in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(ids[None].long(), **options)


def reference_logits(folder: Path, ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the logits [T, V] of transformers for one sequence ids [T]."""
    logits: Tensor = reference(folder, ids, dtype).logits[0]
    return logits


def first_logits(model: Model, count: int = 20) -> Tensor:
    """Return the logits [count, V] of the tokens 0, 1, ..."""
    return ModelRunner(model, 1, 32).step({0: torch.arange(count)})[0]


class ModelRunner:
    """Request rows and their KV cache, to run a model step by step.

    The cache initially has random values, and the blocks of all rows are shuffled.

    Attributes:
        length: committed tokens of each row.
    """

    def __init__(self, model: Model, num_rows: int, max_len: int, block_size: int = 16) -> None:
        config = model.config
        self.model = model
        self.table = Table.empty(num_rows, max_len, block_size, config.vocab_size, model.device)
        blocks = self.table.block_table
        generator = torch.Generator().manual_seed(1)
        shape = model.allocate_kv_cache(blocks.numel(), block_size).shape
        self.cache = (10 * torch.randn(shape, generator=generator)).to(model.device, model.dtype)
        blocks.copy_(torch.randperm(blocks.numel(), generator=generator).view(blocks.shape))
        self.length = [0] * num_rows

    def step(
        self, chunks: Mapping[int, Tensor], keep: int | None = None, room: int | None = None
    ) -> dict[int, Tensor]:
        """Append the tokens `chunks[row]` [n] to each row and return logits [n, V] by row.

        Args:
            keep: number of tokens of each chunk to commit (default: all).
            room: on a GPU, the tokens per row that the batch has room for.
        """
        pieces = [Chunk(row, self.length[row], len(chunk)) for row, chunk in chunks.items()]
        for (row, start, count), chunk in zip(pieces, chunks.values()):
            self.table.tokens[row, start : start + count] = chunk
        widest = max(count for _, _, count in pieces)
        if widest > MAX_QUERIES:
            batch = Batch.from_chunks(self.table, pieces)
        else:
            columns = torch.tensor(pieces, dtype=torch.int32).T.contiguous()
            rows, first, count = columns.to(self.model.device)
            batch = lay_out(self.table, rows, first, count, room or widest)
        logits = self.model.logits(self.model.forward(batch, self.cache), num_used=batch.num_used)
        out = {}
        for (row, _, count), begin in zip(pieces, batch.q_start.tolist()):
            self.length[row] += count if keep is None else keep
            out[row] = logits[begin : begin + count]
        return out
