"""GGUF files are converted to the Hugging Face layout without loss; unsupported files are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nanospec.models.gguf import ConversionError, convert
from tests.gguf_file import VOCAB, write_gguf


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tensors_are_unchanged(tmp_path: Path, architecture: str, tied: bool) -> None:
    weights = write_gguf(tmp_path / "m.gguf", architecture, tied)
    convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    result = load_file(tmp_path / "m" / "model.safetensors")
    assert result.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(result[name].numpy(), values), name
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (5000.0, 1e-5, 8)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCAB, 64)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_computes_same_logits(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    weights = write_gguf(tmp_path / "m.gguf", architecture)
    convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    # The same model, built from the weights before llama.cpp's reordering.
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    expected = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    assert expected.load_state_dict(state, strict=False).unexpected_keys == []
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantized_tensors_are_expanded(tmp_path: Path, dtype: str) -> None:
    weights = write_gguf(tmp_path / "m.gguf", quantized=True)
    convert(tmp_path / "m.gguf", tmp_path / "m", dtype)
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        assert tensor.dtype == getattr(torch, dtype)
        expected = torch.from_numpy(weights[name])
        torch.testing.assert_close(tensor.float(), expected, rtol=0.01, atol=0.01)


def test_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    encoded = tokenizer.encode("ab 12<|im_end|><tool>a")
    assert encoded.tokens == ["ab", "Ġ", "1", "2", "<|im_end|>", "<tool>", "a"]
    assert tokenizer.decode(encoded.ids) == "ab 12<tool>a"  # a user-defined token is not special
    assert tokenizer.get_vocab_size() == VOCAB - 1  # the unused token is left out
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert (tmp_path / "m" / "chat_template.jinja").read_text().startswith("{{ messages")


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["Ġ", "Ġ", "a", "0", "1", "2", "3"]),
        ("qwen2", ["Ġ", "Ġ", "a", "0", "1", "2", "3"]),
        ("llama-bpe", ["<|im_start|>", "Ġ", "Ġ", "a", "0", "1", "2", "3"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", pre=pre)
    convert(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.encode("  a0123").tokens == tokens
    assert tokenizer.pre_tokenizer is not None
    pieces = [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 0123")]
    numbers = ["Ġ", "012", "3"] if pre == "llama-bpe" else ["Ġ", "0", "1", "2", "3"]
    assert pieces == ["a", *numbers]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_tokenizer_pre("gpt-4o"), "'gpt-4o' is not supported"),
        (lambda w: w.add_tokenizer_model("llama"), "tokenizer 'llama' with"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "RoPE scaling 'yarn'"),
        (lambda w: w.add_expert_count(8), "mixture-of-experts"),
        (lambda w: w.add_rope_dimension_count(4), "RoPE of 4 of 8 dimensions"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(4)), "RoPE scaling tensor 'rope_freqs"),
        (lambda w: w.add_tensor("blk.0.ssm.weight", np.ones(4)), "'blk.0.ssm.weight' is not supported"),
        (lambda w: w.add_head_count(0), "ZeroDivisionError: .* or corrupt; download it again"),
        (lambda w: w.add_string("llama.embedding_length", "x" * 1000), "or corrupt; download it"),
        (lambda w: w.add_block_count(2**31), "num_hidden_layers=2147483648 must be"),
    ],
    ids=["pre", "tokenizer", "rope-scaling", "moe", "part", "freqs", "tensor", "zero", "type", "huge"],
)
def test_unsupported_file_is_rejected(
    tmp_path: Path, edit: Callable[[gguf.GGUFWriter], Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", edit=lambda writer: edit_again(writer, edit))
    with pytest.raises(ConversionError, match=message) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "m")
    assert len(str(caught.value)) < 600


def test_length_beyond_the_file_is_rejected(tmp_path: Path) -> None:
    """The gguf library would loop 2^62 times."""
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    key = b"tokenizer.ggml.merges"
    at = data.index(key) + len(key) + 8  # the types of an array and of its elements
    path.write_bytes(data[:at] + (2**62).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(ConversionError, match="unexpected end of file.* download it again"):
        convert(path, tmp_path / "m")


def edit_again(writer: gguf.GGUFWriter, edit: Callable[[gguf.GGUFWriter], Any]) -> None:
    """Apply `edit`, which may set a key again, which the writer would reject."""
    before = dict(writer.kv_data[0])
    writer.kv_data[0].clear()
    edit(writer)
    writer.kv_data[0] = {**before, **writer.kv_data[0]}


def test_unknown_architecture_is_rejected(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConversionError, match="'mamba' is not supported; use llama or qwen2"):
        convert(tmp_path / "m.gguf", tmp_path / "m")


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for kept in (0, 3, 100, len(data) // 3, len(data) - 1):
        path.write_bytes(data[:kept])
        with pytest.raises(ConversionError, match="not a GGUF file, or corrupt; download it again"):
            convert(path, tmp_path / "m")
