"""Checkpoints are loaded correctly or rejected with the reason."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.kernels import launch
from nanospec.models import weights
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model, resolve_dtype
from tests.tiny import ModelRunner, checkpoint, tiny_config

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


def logits(model: Model) -> Tensor:
    return ModelRunner(model, 1, 32).step({0: torch.arange(20)})[0]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, dtype, "cpu")


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite the tensors of a one-file checkpoint."""
    tensors = {name: t.clone() for name, t in load_file(folder / FILE).items()}
    change(tensors)
    save_file(tensors, folder / FILE)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same checkpoint in one file and in several."""
    folder = tmp_path_factory.mktemp("originals")
    checkpoint(folder / "shards", "llama", max_shard_size="100KB")
    return {"file": checkpoint(folder / "file", "llama"), "shards": folder / "shards"}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint of one file that the test may modify."""
    return Path(shutil.copytree(originals["file"], tmp_path / "model"))


def test_file_layouts(originals: dict[str, Path], folder: Path) -> None:
    expected = logits(load(originals["file"]))
    assert len(list(originals["shards"].glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(originals["shards"])), expected)
    other = (folder / FILE).rename(folder / "consolidated.safetensors")
    model = load(folder)
    with other.open("r+b") as stream:  # in place, visible through a memory mapping
        stream.write(bytes(other.stat().st_size))
    assert torch.equal(logits(model), expected)


def test_dtypes(folder: Path) -> None:
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / FILE).items()}
        save_file(tensors, folder / FILE)
        table = load_file(folder / FILE)[EMBEDDING]
        assert table.dtype == stored
        for wanted in (torch.float32, torch.bfloat16):
            model = load(folder, wanted)
            assert torch.equal(model.embedding, table.to(wanted))
            assert logits(model).dtype == wanted


def test_tensors_that_are_not_needed_are_ignored(folder: Path, tmp_path: Path) -> None:
    tied = checkpoint(tmp_path / "tied", "qwen2-tied")
    expected = logits(load(folder)), logits(load(tied))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit(folder, lambda tensors: tensors.update(frequencies))
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    assert torch.equal(logits(load(folder)), expected[0])
    assert torch.equal(logits(load(tied)), expected[1])


# ---- errors ----------------------------------------------------------------------------------------


def load_error(folder: Path) -> str:
    """Check that loading fails with a one-line message, and return it."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(folder)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_all_mismatches_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(65)
        name = "model.layers.2.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    edit(folder, spoil)
    monkeypatch.setattr(weights, "Model", None)  # nothing is loaded before the check
    assert load_error(folder) == (
        f"The weights in {folder} do not fit its config.json: "
        "1 tensor(s) missing: model.layers.1.mlp.up_proj.weight; "
        "1 tensor(s) unexpected: model.layers.0.self_attn.q_proj.bias; "
        "1 tensor(s) of the wrong shape: model.norm.weight [65] instead of [64]; "
        "1 tensor(s) not stored as F32, BF16, F16: model.layers.2.mlp.down_proj.weight I8."
    )


def test_long_lists_and_names_are_truncated(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    edit(folder, lambda tensors: tensors.update({"x" * 10**5: torch.zeros(1), "a\nb": torch.zeros(1)}))
    message = load_error(folder)
    assert "27 tensor(s) missing" in message
    assert "and 19 more" in message
    assert "2 tensor(s) unexpected: 'a\\nb', 'xxx" in message
    assert len(message) < 1000


def test_broken_files(folder: Path) -> None:
    file = folder / FILE
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\n" * 3
    for content in (*(whole[:size] for size in (0, 4, 100, -1)), b"\xff" * 1000, pointer):
        file.write_bytes(content)
        assert f"{file} is not a valid safetensors file" in load_error(folder)


def duplicate(folder: Path) -> None:
    """Copy the tensors of a shard to another."""
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    save_file(load_file(first) | load_file(second), second)


def indexed(content: object) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps(content))


FOLDERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no-folder": ("file", shutil.rmtree, r"needs a config\.json"),
    "no-config": ("file", lambda it: (it / "config.json").unlink(), r"needs a config\.json"),
    "pickle": (
        "file",
        lambda it: (it / FILE).rename(it / "model.bin"),
        r"no \*\.safetensors file \(found model\.bin; convert to safetensors first\); download",
    ),
    "no-weights": ("file", lambda it: (it / FILE).unlink(), "safetensors file; download the model again"),
    "no-index": ("shards", lambda it: (it / INDEX).unlink(), r"has \d safetensors files but neither model\."),
    "no-shard": (
        "shards",
        lambda it: max(it.glob("*.safetensors")).unlink(),
        r"lacks 1 of the (\d+) shards in model\.safetensors\.index\.json: model-0*\1-of-0*\1\.safetensors;",
    ),
    "same-tensor": ("shards", duplicate, "has tensors that another shard has too: "),
    "broken-index": ("shards", lambda it: (it / INDEX).write_text("{"), "is not valid JSON"),
    "empty-index": ("shards", indexed({}), "must have a 'weight_map'"),
    "number": ("shards", indexed({"weight_map": {"a": 1}}), "lacks 1 of the 1 shards .*: 1;"),
    "outside": ("shards", indexed({"weight_map": {"a": "../a.safetensors"}}), r"json: \.\./a\.safetensors;"),
    "absolute": ("shards", indexed({"weight_map": {"a": "/etc/passwd"}}), "json: /etc/passwd;"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_incomplete_folders_are_rejected(case: str, originals: dict[str, Path], tmp_path: Path) -> None:
    kind, change, words = FOLDERS[case]
    folder = Path(shutil.copytree(originals[kind], tmp_path / "model"))
    change(folder)
    assert re.search(words, load_error(folder))


# ---- dtypes ----------------------------------------------------------------------------------------


def test_resolve_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    half, brain = tiny_config(dtype="float16"), tiny_config(dtype="bfloat16")
    for name, config, device, expected in (
        ("float32", half, "cpu", torch.float32),
        ("bfloat16", half, "cpu", torch.bfloat16),
        ("float16", brain, "cuda", torch.float16),
        ("auto", half, "cuda:1", torch.float16),
        ("auto", brain, "cuda", torch.bfloat16),
    ):
        assert resolve_dtype(name, config, device) == expected
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(weights, "fast_in_bfloat16", lambda fast=fast: fast)
        assert resolve_dtype("auto", half, torch.device("cpu")) == expected
    with pytest.raises(ValueError, match="not supported on a CPU"):
        resolve_dtype("float16", half, "cpu")
    with pytest.raises(ValueError, match="'int8' must be 'auto' or one of 'float32'"):
        resolve_dtype("int8", half, "cpu")


def test_fast_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, compiles, brain, amx in itertools.product(
        ("AVX512", "AVX2", "DEFAULT", "SVE256"), (True, False), (True, False), (True, False)
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
            patch.setattr(launch, "library", lambda c=compiles: object() if c else None)
            for probe, answer in (("_is_avx512_bf16_supported", brain), ("_is_amx_tile_supported", amx)):
                patch.setattr(torch.cpu, probe, lambda answer=answer: answer, raising=False)
            by_pytorch = brain or amx
            assert weights.fast_in_bfloat16() == (by_pytorch or (compiles and capability.startswith("AVX")))
            with launch.forced("naive"):
                assert weights.fast_in_bfloat16() == by_pytorch
