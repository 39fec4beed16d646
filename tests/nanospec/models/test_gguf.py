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

from nanospec.models.formats.gguf import ConversionError, convert
from tests.gguf_file import VOCAB, write_gguf


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_transformers_computes_same_logits(tmp_path: Path, architecture: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    weights = write_gguf(tmp_path / "m.gguf", architecture, tied)
    convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    result = load_file(tmp_path / "m" / "model.safetensors")
    assert result.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(result[name].numpy(), values), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    files = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "m").glob("*.json")}
    assert files["generation_config"] == {"bos_token_id": 1, "eos_token_id": [2, 0]}
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "model_max_length": 64}
    assert files["tokenizer_config"].items() >= named.items()
    given = {"tie_word_embeddings": tied, "rope_theta": 5000.0, "rms_norm_eps": 1e-5, "head_dim": 8}
    given |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2}
    assert files["config"].items() >= given.items()
    assert (tmp_path / "m" / "chat_template.jinja").read_text().startswith("{{ messages")
    # The same model, built from the weights before llama.cpp's reordering.
    expected = transformers.AutoModelForCausalLM.from_config(loaded.config)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    assert expected.load_state_dict(state, strict=False).unexpected_keys == []
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=0, atol=0)


def test_quantized_tensors_are_expanded(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", quantized=True)
    convert(tmp_path / "m.gguf", tmp_path / "m", "bfloat16")
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), torch.from_numpy(weights[name]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_tokenizers(tmp_path: Path, pre: str) -> None:
    write_gguf(tmp_path / "m.gguf", pre=pre)
    convert(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    encoded = tokenizer.encode("  ab0123<|im_end|><tool>a")
    pieces = ["Ġ", "Ġ", "ab", "0", "1", "2", "3", "<|im_end|>", "<tool>", "a"]
    assert encoded.tokens == (["<|im_start|>", *pieces] if pre == "llama-bpe" else pieces)
    assert tokenizer.decode(encoded.ids) == "  ab0123<tool>a"  # a user-defined token is not special
    assert tokenizer.get_vocab_size() == VOCAB - 1  # the unused token is left out
    assert (tokenizer.normalizer is not None) == (pre == "qwen2")  # NFC
    assert tokenizer.pre_tokenizer is not None
    words = [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 0123")]
    assert words == ["a", *(["Ġ", "012", "3"] if pre == "llama-bpe" else ["Ġ", "0", "1", "2", "3"])]


UNSUPPORTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pre": (lambda w: w.add_tokenizer_pre("gpt-4o"), "'gpt-4o' is not supported"),
    "tokenizer": (lambda w: w.add_tokenizer_model("llama"), "tokenizer 'llama' with"),
    "rope-scaling": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "RoPE scaling 'yarn'"),
    "experts": (lambda w: w.add_expert_count(8), "mixture-of-experts"),
    "tensor": (lambda w: w.add_tensor("blk.0.ssm.weight", np.ones(4)), "'blk.0.ssm.weight' is not supported"),
    "architecture": (lambda w: w.add_string("general.architecture", "mamba"), "'mamba' is not supported"),
    "no-merges": (lambda w: w.kv_data[0].update({"tokenizer.ggml.merges": None}), "merges' is missing"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_file_is_rejected(tmp_path: Path, case: str) -> None:
    edit, message = UNSUPPORTED[case]

    def edit_again(writer: gguf.GGUFWriter) -> None:
        """Let `edit` set a key again, which the writer would reject, or remove it."""
        fields = writer.kv_data[0]
        writer.kv_data[0] = {}
        edit(writer)
        merged = {**fields, **writer.kv_data[0]}
        writer.kv_data[0] = {key: field for key, field in merged.items() if field}

    write_gguf(tmp_path / "m.gguf", edit=edit_again)
    with pytest.raises(ConversionError, match=message) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "m")
    assert len(str(caught.value)) < 600


def test_corrupt_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ConversionError, match="file not found; specify the path of a GGUF file"):
        convert(path, tmp_path / "m")
    write_gguf(path)
    data, key = path.read_bytes(), b"tokenizer.ggml.merges"
    at = data.index(key) + len(key) + 8  # after the types of an array and of its elements
    huge = data[:at] + (2**62).to_bytes(8, "little") + data[at + 8 :]  # the library would loop 2^62 times
    for content in (b"", data[:100], data[:-1], huge):
        path.write_bytes(content)
        with pytest.raises(ConversionError, match=r"not a GGUF file, or corrupt; download it again"):
            convert(path, tmp_path / "m")
