"""Checkpoints are loaded correctly or rejected with the reason."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.kernels import launch
from nanospec.models import weights
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model, resolve_dtype
from tests.tiny import ModelRunner, checkpoint, tiny_config

IDS = torch.arange(20)


def logits(model: Model) -> Tensor:
    return ModelRunner(model, 1, 32).step({0: IDS})[0]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("original"), "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint of one file that the test may modify."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same checkpoint in several files."""
    return checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB")


@pytest.fixture
def expected(original: Path) -> Tensor:
    return logits(load_model(original, torch.float32, "cpu"))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the tensors of a one-file checkpoint."""
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path) -> Model:
    return load_model(folder, torch.float32, "cpu")


def load_error(folder: Path, kind: Any = ValueError) -> str:
    """Check that loading fails with a one-line message, and return it."""
    with pytest.raises(kind) as caught:
        load(folder)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_shards(sharded: Path, expected: Tensor) -> None:
    assert not (sharded / "model.safetensors").exists()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(sharded)), expected)


def test_other_file_name(folder: Path, expected: Tensor) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(folder, wanted, "cpu")
    assert table.dtype == stored
    assert torch.equal(model.embedding, table.to(wanted))
    assert logits(model).dtype == wanted


def test_weights_do_not_alias_the_file(folder: Path, expected: Tensor) -> None:
    model = load(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:  # in place, visible through a memory mapping
        stream.write(bytes(file.stat().st_size))
    assert torch.equal(logits(model), expected)


def test_all_mismatches_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(65)
        name = "model.layers.2.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    edit(folder, spoil)
    monkeypatch.setattr(weights, "Model", None)  # nothing is loaded before the check
    message = load_error(folder)
    assert "1 tensor(s) missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 tensor(s) unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "of the wrong shape: model.norm.weight [65] instead of [64]" in message
    assert "not stored as F32, BF16, F16: model.layers.2.mlp.down_proj.weight I8" in message


def test_long_lists_and_names_are_truncated(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    edit(folder, lambda tensors: tensors.update({"x" * 10**5: torch.zeros(1), "a\nb": torch.zeros(1)}))
    message = load_error(folder)
    assert "27 tensor(s) missing" in message
    assert "and 19 more" in message
    assert "2 tensor(s) unexpected: 'a\\nb', 'xxx" in message
    assert len(message) < 1000


def test_ignored_extra_tensors(folder: Path, expected: Tensor) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit(folder, lambda tensors: tensors.update(extra))
    assert torch.equal(logits(load(folder)), expected)


def test_lm_head_next_to_tied_embedding(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen2-tied")
    expected = logits(load(folder))
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(folder)), expected)


def test_broken_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\n" * 3
    for content in (*(whole[:size] for size in (0, 4, 100, -1)), b"\xff" * 1000, pointer):
        file.write_bytes(content)
        assert f"{file} is not a valid safetensors file" in load_error(folder)


def test_missing_files(folder: Path) -> None:
    for other in ("nowhere", "config.json"):
        assert "a model folder needs a config.json" in load_error(folder / other, FileNotFoundError)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "found pytorch_model.bin" in load_error(folder, FileNotFoundError)
    (folder / "pytorch_model.bin").unlink()
    assert load_error(folder, FileNotFoundError).endswith("safetensors file; download the model again.")
    (folder / "config.json").unlink()
    assert "needs a config.json" in load_error(folder, FileNotFoundError)


def test_several_files_without_an_index(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    assert "2 safetensors files but neither" in load_error(folder)


def test_missing_shard(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    files[1].unlink()
    message = load_error(sharded, FileNotFoundError)
    assert f"lacks 1 of the {len(files)} shards" in message
    assert files[1].name in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("{}", "must have a 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "lacks 1 of the 1 shards .*: 1;"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "index.json: ../a.safetensors;"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "index.json: /etc/passwd;"),
    ],
    ids=["broken", "empty", "number", "outside", "absolute"],
)
def test_bad_index(sharded: Path, content: str, words: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert re.search(words, load_error(sharded, (ValueError, FileNotFoundError)))


def test_tensor_in_two_shards(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    save_file(load_file(files[0]) | load_file(files[1]), files[1])
    assert "has tensors that another shard has too: " in load_error(sharded)


def test_resolve_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(dtype="float16")
    assert resolve_dtype("float32", config, "cpu") == torch.float32
    assert resolve_dtype("bfloat16", config, "cpu") == torch.bfloat16
    assert resolve_dtype("float16", config, "cuda") == torch.float16
    assert resolve_dtype("auto", config, "cuda:1") == torch.float16
    assert resolve_dtype("auto", tiny_config(dtype="bfloat16"), "cuda") == torch.bfloat16
    monkeypatch.setattr(weights, "fast_in_bfloat16", lambda: True)
    assert resolve_dtype("auto", config, torch.device("cpu")) == torch.bfloat16
    monkeypatch.setattr(weights, "fast_in_bfloat16", lambda: False)
    assert resolve_dtype("auto", config, "cpu") == torch.float32
    with pytest.raises(ValueError, match="not supported on a CPU"):
        resolve_dtype("float16", config, "cpu")
    with pytest.raises(ValueError, match="'int8' must be 'auto' or one of 'float32'"):
        resolve_dtype("int8", config, "cpu")


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT", "SVE256"])
@pytest.mark.parametrize("compiles", [True, False])
def test_fast_in_bfloat16(monkeypatch: pytest.MonkeyPatch, capability: str, compiles: bool) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(launch, "library", lambda: object() if compiles else None)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    for native in (False, True):
        probe = partial(bool, native)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", probe, raising=False)
        assert weights.fast_in_bfloat16() == (native or (compiles and capability.startswith("AVX")))
        with launch.forced("naive"):
            assert weights.fast_in_bfloat16() == native
