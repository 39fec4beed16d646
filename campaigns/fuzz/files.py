"""Fuzz targets that read files: each must give a valid object or an error message that names a file."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers, processors

from nanospec.apps.openai_format import token_bytes
from nanospec.config import SpecConfig
from nanospec.drafters import Drafter
from nanospec.drafters import Target as DraftTarget
from nanospec.drafters.methods import METHODS
from nanospec.kernels import launch
from nanospec.models import weights
from nanospec.models.config import ModelConfig, frequencies
from nanospec.models.decoder import Model
from nanospec.models.families import FAMILIES, config_of, read_config
from nanospec.models.formats.gguf import LINK, folder_files
from nanospec.models.formats.gguf.file import GGUFCheckpoint
from nanospec.models.formats.safetensors import weight_files
from nanospec.text.tokenizer import Detokenizer, Tokenizer
from tests.drive import Job, greedy, make_engine, run
from tests.gguf_file import write_gguf
from tests.random_weights import write_drafter
from tests.tiny import tiny_model

from . import Target
from .errors import answer
from .mutation import files_of, folder_of, mutate_bytes, mutate_files, mutate_json, with_header


@contextmanager
def folder_with(files: dict[str, bytes]) -> Iterator[Path]:
    """Write files to a temporary folder."""
    with tempfile.TemporaryDirectory() as path:
        for name, content in files.items():
            (Path(path) / name).write_bytes(content)
        yield Path(path)


# ---- config: config.json gives a valid `ModelConfig` -----------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "mlp_bias": True,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.5}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": LLAMA3, "rope_theta": 1e5, "hidden_act": "silu"},
    "MistralForCausalLM": {"sliding_window": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": LLAMA3},
    "Phi3ForCausalLM": {"rope_scaling": LONG, "original_max_position_embeddings": 32},
    "Gemma2ForCausalLM": {"hidden_activation": "gelu_pytorch_tanh"},
    "Gemma3ForCausalLM": {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {}}},
    "Gemma3ForConditionalGeneration": {"text_config": {**SMALL, "sliding_window_pattern": 2}},
}
CONFIGS = [json.dumps({"architectures": [name], **SMALL, **more}).encode() for name, more in KINDS.items()]
assert set(KINDS) == set(FAMILIES)  # add a seed for each new family


def config(data: bytes) -> None:
    with folder_with({"config.json": data}) as folder:
        result = answer(read_config, folder)
    if result is not None:
        family, found = result
        assert len(family.stored_shapes(found)) <= len(family.places(found))
        assert found.attention_scale > 0
        for rope in (found.rope, found.local_rope):
            assert rope is None or frequencies(rope, found.head_dim, 64).isfinite().all()


# ---- weights: safetensors files, also sharded, give their exact contents ---------------------------------

CONFIG = {**SMALL, "architectures": ["LlamaForCausalLM"], "mlp_bias": False, "num_hidden_layers": 1}
SHAPES = config_of(CONFIG).parameter_shapes()
NAMES = list(SHAPES)
HALVES = {"a.safetensors": NAMES[:5], "b.safetensors": NAMES[5:]}
MAP = {"weight_map": {name: file for file, names in HALVES.items() for name in names}}


def tensors_of(names: list[str]) -> bytes:
    """Return a safetensors file with tensors of the model, filled with ones."""
    header, body = {}, b""
    for name in names:
        begin, body = len(body), body + b"\x80\x3f" * math.prod(SHAPES[name])
        offsets = [begin, len(body)]
        header[name] = {"dtype": "BF16", "shape": list(SHAPES[name]), "data_offsets": offsets}
    return with_header(json.dumps(header).encode(), body)


def weight_seeds() -> list[bytes]:
    halves = {file: tensors_of(names) for file, names in HALVES.items()}
    return [
        folder_of({"model.safetensors": tensors_of(NAMES)}),
        folder_of({"other.safetensors": tensors_of(NAMES)[: 1 << 14]}),
        folder_of({**halves, "model.safetensors.index.json": json.dumps(MAP).encode()}),
    ]


def read_weights(data: bytes) -> None:
    with folder_with({**files_of(data), "config.json": json.dumps(CONFIG).encode()}) as folder:
        tensors = answer(load_weights, folder)
        if tensors is not None:
            stored = [load_file(file) for file in weight_files(folder)]
            for name, tensor in tensors.items():
                found = [each[name].float().view(torch.int32) for each in stored if name in each]
                assert any(torch.equal(tensor.view(torch.int32), bits) for bits in found), name


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the loader passes to the model."""

    def model(config: ModelConfig, dtype: torch.dtype, device: str, get: Any) -> dict[str, torch.Tensor]:
        return {name: get(name) for name in config.parameter_shapes()}

    with patch.object(weights, "model_class", lambda *_: model):
        tensors: Any = weights.load_model(folder, torch.float32, "cpu")
    assert tensors
    return dict(tensors)


# ---- drafters: folders of DFlash and EAGLE-3 drafters, which draft for the target ------------------------


@cache
def model() -> Model:
    heads: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    return tiny_model(vocab_size=16, hidden_size=8, intermediate_size=8, **heads)


def drafter_seeds() -> list[bytes]:
    seeds = []
    for method, options in (
        ("dflash", {"num_layers": 2, "vocab": 12}),
        ("dflash", {"own_head": True, "attention_bias": True}),
        ("eagle3", {"vocab": 12, "own_head": True, "norm_before_residual": True}),
        ("eagle3", {"model_type": "qwen3"}),
    ):
        with tempfile.TemporaryDirectory() as path:
            folder = write_drafter(Path(path), method, model().config, **options)
            seeds.append(folder_of({file.name: file.read_bytes() for file in folder.iterdir()}))
    return seeds


def load_drafter(folder: Path, method: str) -> Drafter:
    spec = SpecConfig(method, str(folder), tree_width=2 if method == "dflash" else 1)
    return METHODS[method].load(spec, DraftTarget(model()))


def drafters(data: bytes) -> None:
    with folder_with(files_of(data)) as folder, launch.forced("naive"):
        for method in ("dflash", "eagle3"):
            drafter = answer(load_drafter, folder, method)
            if drafter is not None:
                run(make_engine(model(), 3, drafter=drafter), [Job([1, 2, 3], greedy(4))])


# ---- tokenizer: folders of tokenizer files, which encode and decode --------------------------------------


def tokenizer_seeds() -> list[bytes]:
    """Return small tokenizers with all kinds of components."""
    texts = ["<s>", "</s>", *"abĠ", "ab", *(f"<0x{byte:02X}>" for byte in (0x41, 0xC3, 0xA9))]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    ids = b'{"eos_token_id": [1, 2], "bos_token_id": 0}'
    files = {"tokenizer.json": backend.to_str().encode(), "generation_config.json": ids}
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    settings = {**tokens, "chat_template": "{{ messages[0].content }}"}
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    named = json.dumps({"chat_template": templates}).encode()
    config = {"tokenizer_config.json": json.dumps(settings).encode(), "config.json": b"{}"}
    return [
        folder_of({**files, **config}),
        folder_of({**files, "tokenizer_config.json": named, "chat_template.jinja": b"{{ 1 }}"}),
    ]


def tokenizer(data: bytes) -> None:
    with folder_with(files_of(data)) as folder:
        found = answer(Tokenizer, str(folder))
    if found is not None:
        ids = answer(found.encode, "ab a\n é")
        answer(found.decode, list(range(12)) + (ids or []))
        stream = Detokenizer(found)
        for i in (*range(12), *(ids or [])):
            assert isinstance(stream.push([i]) + found.text_of(i), str)
            assert isinstance(token_bytes(found, i, found.text_of(i)), bytes)
        assert isinstance(stream.flush(), str)
        assert all(type(i) is int and 0 <= i < 2**31 for i in found.eos_token_ids)
        answer(found.apply_chat_template, [{"role": "user", "content": "a"}])


# ---- gguf: a GGUF file gives a readable checkpoint -------------------------------------------------------

HEAD = 6000  # bytes of the fields and tensor shapes, which precede the tensor data


def gguf_seeds() -> list[bytes]:
    seeds = []
    for architecture, kind in (("llama", "Q8_0"), ("qwen2", "Q4_K")):
        with tempfile.TemporaryDirectory() as path:
            write_gguf(Path(path) / "m.gguf", architecture, kind=kind)
            seeds.append((Path(path) / "m.gguf").read_bytes())
    return seeds


def mutate_gguf(data: bytes, rng: Random) -> bytes:
    """Mutate the head, mostly without moving the tensor data."""
    head = mutate_bytes(data[:HEAD], rng)
    return (head if rng.random() < 0.2 else head[:HEAD].ljust(HEAD, b"\0")) + data[HEAD:]


def gguf(data: bytes) -> None:
    with folder_with({LINK: data}) as folder:
        files = answer(lambda path: folder_files(GGUFCheckpoint(path), "bfloat16"), folder / LINK)
        if files is not None:
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
            answer(load_weights, folder)
            answer(Tokenizer, folder)


TARGETS = {
    "config": Target(lambda: CONFIGS, config, mutate_json),
    "weights": Target(weight_seeds, read_weights, mutate_files),
    "drafters": Target(drafter_seeds, drafters, mutate_files),
    "tokenizer": Target(tokenizer_seeds, tokenizer, mutate_files),
    "gguf": Target(gguf_seeds, gguf, mutate_gguf),
}
