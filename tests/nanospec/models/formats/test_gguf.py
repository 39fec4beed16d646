"""GGUF files are loaded and converted without loss, except for Q6_K; unsupported files are rejected."""

import json
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from nanospec.extras.tensor_parallel.shard import Shard
from nanospec.kernels.layer.quantized import Quantized
from nanospec.models import formats
from nanospec.models.config import ModelConfig, Rope, frequencies
from nanospec.models.families import read_config
from nanospec.models.folders import resolve_model
from nanospec.models.formats.gguf import GGUFCheckpoint, convert, file
from nanospec.models.weights import load_model
from tests.gguf_file import VOCAB, write_gguf
from tests.ranks import together
from tests.tiny import first_logits, reference_logits
from tests.util import assert_close


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
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
    given = {"tie_word_embeddings": tied, "rope_theta": 5000.0, "rms_norm_eps": 1e-5}
    given |= {"head_dim": 16 if architecture == "qwen3" else 8}
    given |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2}
    assert files["config"].items() >= given.items()
    assert (tmp_path / "m" / "chat_template.jinja").read_text().startswith("{{ messages")
    # The same model, built from the weights before llama.cpp's reordering.
    expected = transformers.AutoModelForCausalLM.from_config(loaded.config)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    assert expected.load_state_dict(state, strict=False).unexpected_keys == []
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=0, atol=0)


def test_rope_of_llama3(tmp_path: Path) -> None:
    """llama.cpp stores the divisors of the frequencies; config.json of Llama 3 has their parameters."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    write_gguf(tmp_path / "plain.gguf")
    convert(tmp_path / "plain.gguf", tmp_path / "plain", "float32")
    config = tmp_path / "plain" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_scaling": rope}))
    expected, (_, parsed) = logits(tmp_path / "plain"), read_config(tmp_path / "plain")
    factors = frequencies(Rope(theta=5000.0), 8, 64) / frequencies(parsed.rope, 8, 64)
    assert factors[0] == 1 < factors[1] < factors[2] == factors[3] == 8
    add = lambda writer: writer.add_tensor("rope_freqs.weight", factors.float().numpy())  # noqa: E731
    write_gguf(tmp_path / "m.gguf", edit=add)
    assert_close(logits(resolve_model(tmp_path / "m.gguf")), expected, 1e-5)
    convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    assert_close(reference_logits(tmp_path / "m", torch.arange(VOCAB), torch.float32), expected, 1e-5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanospec" / "gguf"


# bits and whether there are minima
KINDS = {"Q4_0": (4, False), "Q4_1": (4, True), "Q5_0": (8, False), "Q5_1": (8, True), "Q8_0": (8, False)}
KINDS |= {"Q4_K": (4, True), "Q5_K": (8, True), "Q6_K": (8, False)}


@pytest.mark.parametrize("kind", [*KINDS, "F16", "BF16"])
def test_decoded_values(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_gguf(tmp_path / "m.gguf", kind=kind, edit=lambda it: it.add_custom_alignment(4096))
    monkeypatch.setitem(sys.modules, "gguf", None)  # not needed
    convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        assert kind == "Q6_K" or np.array_equal(tensor.numpy(), weights[name]), name
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    monkeypatch.setattr(file, "CHUNK", 5 * 256)  # several chunks, the last one smaller
    for name, values in weights.items():
        stored = checkpoint.get(name)
        if kind not in KINDS or checkpoint.tensors[name].type == "F32":
            assert isinstance(stored, Tensor)
            assert np.array_equal(stored.float().numpy(), values)
            continue
        assert isinstance(stored, Quantized)
        assert (stored.group, stored.bits, stored.minimum is not None) == (32, *KINDS[kind])
        groups, most = torch.from_numpy(values).unflatten(1, (-1, 32)), 1.001 / 254 if kind == "Q6_K" else 0
        error = stored.to("cpu", torch.float32).dequantize().view_as(groups) - groups
        assert (error.abs() <= groups.abs().amax(-1, keepdim=True) * most).all()
        assert not error[:, ::8].any()  # groups of Q6_K with equal scales


def logits(folder: Path, split: Callable[[ModelConfig], Shard] | None = None) -> Tensor:
    return first_logits(load_model(folder, "float32", "cpu", split=split), VOCAB)


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_K"), ("qwen2", "Q5_0"), ("qwen3", "Q4_1")])
def test_logits_equal_those_of_converted_folder(tmp_path: Path, architecture: str, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, kind=kind)
    convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    expected, folder = logits(tmp_path / "m"), resolve_model(tmp_path / "m.gguf")
    assert torch.equal(logits(folder), expected)
    for result in together(2, lambda group: logits(folder, partial(Shard, group=group))):
        assert_close(result, expected, 1e-5)


def test_folder_in_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    create = formats.gguf.folder_files

    def create_after_another_process(*arguments: Any) -> dict[str, str]:
        monkeypatch.setattr(formats.gguf, "folder_files", create)
        resolve_model(path)
        return create(*arguments)

    monkeypatch.setattr(formats.gguf, "folder_files", create_after_another_process)
    folder = resolve_model(path)
    assert (os.listdir(cache), folder.name) == ([folder.parent.name], "tiny")
    monkeypatch.setattr(formats.gguf, "GGUFCheckpoint", Mock(side_effect=AssertionError))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny.gguf") == folder  # not written again
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    assert os.listdir(folder.parent) == ["tiny"]
    path.write_bytes(path.read_bytes().replace(b"{{ messages", b"{{ messagez"))  # as large as before
    assert "messagez" in (resolve_model(path) / "chat_template.jinja").read_text()
    write_gguf(path, "qwen2")
    replaced = resolve_model(path)
    assert json.loads((replaced / "config.json").read_text())["model_type"] == "qwen2"
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # cannot have a subfolder
    temporary = resolve_model(path)
    assert not temporary.is_relative_to(cache)
    assert torch.equal(logits(temporary), logits(replaced))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"tiny.gguf is not a file; specify the path of a GGUF file"):
        logits(replaced)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        convert(tmp_path, tmp_path / "m")


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


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGED = ["er", "he", "the", "▁t", "▁the", "▁▁", "th", "her", "re", "▁th", "e▁", "ab", "é▁"]
SPM = ["<unk>", "<s>", "</s>", "<tool>", *BYTES, *MERGED, *"▁abehrté.", "日"]
SCORES = {token: float(score) for score, token in enumerate(sorted(MERGED))}


def sentencepiece(text: str) -> list[str]:
    """Encode `text` as SentencePiece: merge the pair with the highest score until no pair is a token."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while pairs := [(SCORES[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in SCORES]:
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    as_bytes = lambda piece: [BYTES[byte] for byte in piece.encode()]  # noqa: E731
    return [part for piece in pieces for part in ([piece] if piece in SPM else as_bytes(piece))]


def test_sentencepiece(tmp_path: Path) -> None:
    def edit(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(SPM)
        writer.add_token_scores([SCORES.get(token, -1e3) for token in SPM])
        writer.add_token_types([2, 3, 3, 4, *[6] * 256, *[1] * (len(SPM) - 260)])
        writer.kv_data[0].update({"tokenizer.ggml.merges": None})

    write_gguf(tmp_path / "m.gguf", edit=override(edit))
    convert(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer, rng = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json")), random.Random(0)
    texts = [
        "the  her",
        " \n\tthé 日本 😀",
        *("".join(rng.choices("theréab. \n日本", k=30)) for _ in range(50)),
    ]
    for text in texts:
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *sentencepiece(text)]
        assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("a<tool>b</s>").tokens == ["<s>", "▁", "a", "<tool>", "▁", "b", "</s>"]


def override(edit: Callable[[gguf.GGUFWriter], Any]) -> Callable[[gguf.GGUFWriter], None]:
    """Return an edit that also sets keys again, which the writer would reject, or removes them."""

    def edit_again(writer: gguf.GGUFWriter) -> None:
        fields = writer.kv_data[0]
        writer.kv_data[0] = {}
        edit(writer)
        merged = {**fields, **writer.kv_data[0]}
        writer.kv_data[0] = {key: field for key, field in merged.items() if field}

    return edit_again


UNSUPPORTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pre": (lambda w: w.add_tokenizer_pre("gpt-4o"), "'gpt-4o' is not supported"),
    "tokenizer": (lambda w: w.add_tokenizer_model("t5"), "tokenizer 't5' with"),
    "split": (lambda w: w.add_uint16("split.count", 2), r"split.count=2 .* --merge"),
    "rope-factors": (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, "f4")), "for each of 4 pairs"),
    "rope-scaling": (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "scaling.type='yarn' is"),
    "rope-factor": (lambda w: w.add_float32("llama.rope.scaling.factor", 2), "rope.scaling.factor=2.0 is"),
    "experts": (lambda w: w.add_expert_count(8), "expert_count=8 is"),
    "tensor": (lambda w: w.add_tensor("blk.0.ssm.weight", np.ones(4)), "'blk.0.ssm.weight' is not supported"),
    "architecture": (lambda w: w.add_string("general.architecture", "mamba"), "'mamba' is not supported"),
    "no-merges": (
        lambda w: w.kv_data[0].update({"tokenizer.ggml.merges": None}),
        "invalid content .KeyError: 'tokenizer.ggml.merges'.; it may",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_file_is_rejected(tmp_path: Path, cache: Path, case: str) -> None:
    edit, message = UNSUPPORTED[case]
    write_gguf(tmp_path / "m.gguf", edit=override(edit))
    with pytest.raises(ValueError, match=message) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "m")
    assert len(str(caught.value)) < 600
    with pytest.raises(ValueError, match=message):
        resolve_model(tmp_path / "m.gguf")
    assert not list(cache.glob("*"))


HUGE = (2**60).to_bytes(8, "little")
HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "head": (lambda data: data[:100], "requires a buffer"),
    "data": (lambda data: data[:-1], r"'output_norm.weight' ends at byte \d+ of \d+; the file is"),
    "magic": (lambda data: b"<htm" + data[4:], "begins with b'<htm' is not supported"),
    "version": (lambda data: data[:4] + b"\1" + data[5:], "version 1 is not supported"),
    "endian": (lambda data: data[:4] + b"\0\0\0\3" + data[8:], "use a little-endian GGUF file"),
    "strings": (lambda data: insert(data, b"tokenizer.ggml.merges", 8, HUGE), "has invalid content"),
    "type": (lambda data: insert(data, b"tokenizer.ggml.merges", 0, b"\77"), "has invalid content .KeyE"),
    "tensor": (lambda data: insert(data, b"blk.1.ffn_up.weight", 20, b"\27"), "' has the type 23, which"),
    "utf-8": (lambda data: insert(data, b"general.architecture", 12, b"\xff"), "invalid content .Unicode"),
}


def insert(data: bytes, key: bytes, offset: int, new: bytes) -> bytes:
    """Return `data` with `new` at an offset behind the first `key`."""
    at = data.index(key) + len(key) + offset
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize("case", HEADERS)
def test_corrupt_file_is_rejected(tmp_path: Path, cache: Path, case: str) -> None:
    change, message = HEADERS[case]
    write_gguf(path := tmp_path / "m.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"^{path}.*{message}"):
        resolve_model(path)
    assert not list(cache.glob("*"))


NOT_FINITE: dict[str, tuple[int, Any]] = {  # offset in the tensor, and values there
    "nan-scale": (144, np.full(1, np.nan, np.float16)),
    "infinite-minimum": (2, np.full(1, np.inf, np.float16)),
    "zeros": (0, np.zeros(48 * 144, np.uint8)),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_scales_must_be_finite_and_not_all_zero(tmp_path: Path, case: str) -> None:
    at, content = NOT_FINITE[case]
    write_gguf(path := tmp_path / "m.gguf", kind="Q4_K")
    data, begin = path.read_bytes(), GGUFCheckpoint(path).tensors["model.layers.1.mlp.up_proj.weight"].offset
    path.write_bytes(data[: begin + at] + content.tobytes() + data[begin + at + content.nbytes :])
    with pytest.raises(ValueError, match=r"m.gguf.*scales of tensor blk.1.ffn_up.weight are NaN, infinite"):
        logits(resolve_model(path))
