"""Checkpoints are loaded correctly or rejected with the reason."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.models import weights
from nanospec.models.decoder import Model
from nanospec.models.folders import resolve_model
from nanospec.models.weights import load_model, resolve_dtype
from tests.gguf_file import write_gguf
from tests.tiny import checkpoint, first_logits, tiny_config
from tests.util import assert_close

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, dtype, "cpu")


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite the tensors of a one-file checkpoint."""
    tensors = {name: t.clone() for name, t in load_file(folder / FILE).items()}
    change(tensors)
    save_file(tensors, folder / FILE)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the same checkpoint in one file and in several."""
    folder = tmp_path_factory.mktemp("originals")
    checkpoint(folder / "shards", "llama", max_shard_size="100KB")
    return {"file": checkpoint(folder / "file", "llama"), "shards": folder / "shards"}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Return a checkpoint of one file that the test may modify."""
    return Path(shutil.copytree(originals["file"], tmp_path / "model"))


def test_all_file_layouts_load_the_same_weights(originals: dict[str, Path], folder: Path) -> None:
    """Load one file, several files, and a file of another name with an unused tensor, beside a GGUF file."""
    expected = first_logits(load(originals["file"]))
    assert len(list(originals["shards"].glob("*.safetensors"))) > 2
    shards = Path(shutil.copytree(originals["shards"], folder.parent / "shards"))
    shutil.copy(folder / FILE, shards / "consolidated.safetensors")  # not in the index
    assert torch.equal(first_logits(load(shards)), expected)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit(folder, lambda tensors: tensors.update(frequencies))
    other = (folder / FILE).rename(folder / "consolidated.safetensors")
    (folder / "model.gguf").touch()
    model = load(folder)
    with other.open("r+b") as stream:  # in place, visible through a memory mapping
        stream.write(bytes(other.stat().st_size))
    assert torch.equal(first_logits(model), expected)


def test_stored_head_of_tied_model_is_ignored(tmp_path: Path) -> None:
    tied = checkpoint(tmp_path / "tied", "qwen2-tied")
    expected = first_logits(load(tied))
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": torch.zeros_like(tensors[EMBEDDING])}))
    assert torch.equal(first_logits(load(tied)), expected)


def load_error(folder: Path) -> str:
    """Check that loading fails with a one-line message, and return it."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(folder)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_all_mismatches_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(65)
        tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.int8)

    edit(folder, damage)
    monkeypatch.setattr(weights, "Model", None)  # nothing is loaded before the check
    assert load_error(folder) == (
        f"The weights in {folder} do not fit its config.json: "
        "1 tensor(s) missing: model.layers.1.mlp.up_proj.weight; "
        "1 tensor(s) unexpected: model.layers.0.self_attn.q_proj.bias; "
        "1 tensor(s) of the wrong shape: model.norm.weight [65] instead of [64]; "
        "1 tensor(s) not stored as F32, BF16, F16: model.layers.2.mlp.down_proj.weight I8."
    )
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    edit(folder, lambda tensors: tensors.update({"a\n" + "b" * 10**5: torch.zeros(1)}))
    message = load_error(folder)
    assert "27 tensor(s) missing" in message
    assert "and 19 more; 1 tensor(s) unexpected: 'a\\nb" in message
    assert len(message) < 1000


def indexed(content: object) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps(content))


FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("file", shutil.rmtree, r"needs a config\.json"),
    (
        "file",
        lambda it: (it / FILE).rename(it / "model.bin"),
        r"must have .*, but has config\.json, .*model\.bin",
    ),
    ("file", lambda it: (it / FILE).unlink(), "must have model.safetensors, .*; download the model again"),
    ("file", lambda it: (it / FILE).write_text("version https://git-lfs"), f"{FILE} has invalid content"),
    ("file", lambda it: os.truncate(it / FILE, 9999), f"{FILE} has invalid content"),
    ("shards", lambda it: (it / INDEX).unlink(), r"must have model\.safetensors, .* but has config.* model-"),
    (
        "shards",
        lambda it: max(it.glob("*.safetensors")).unlink(),
        r"lacks 1 of the (\d+) shards in model\.safetensors\.index\.json: model-0*\1-of-0*\1\.safetensors;",
    ),
    (
        "shards",
        lambda it: shutil.copy(min(it.glob("*.safetensors")), max(it.glob("*.safetensors"))),
        "has tensors that another shard has too: ",
    ),
    ("shards", indexed({}), "index.json has invalid content"),
    ("shards", indexed({"weight_map": {"a": "../a.safetensors"}}), r"json: \.\./a\.safetensors;"),
    ("shards", indexed({"weight_map": {"a": "/etc/passwd"}}), "json: /etc/passwd;"),
]


@pytest.mark.parametrize(("kind", "change", "words"), FOLDERS, ids=range(len(FOLDERS)))
def test_incomplete_folders_are_rejected(
    kind: str, change: Callable[[Path], object], words: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(originals[kind], tmp_path / "model"))
    change(folder)
    assert re.search(words, load_error(folder))


def test_resolve_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    float16, bfloat16 = tiny_config(dtype="float16"), tiny_config(dtype="bfloat16")
    assert resolve_dtype("bfloat16", float16, "cpu") == torch.bfloat16
    assert resolve_dtype("float16", bfloat16, "cuda") == torch.float16
    assert resolve_dtype("auto", float16, "cuda:1") == torch.float16
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(weights, "fast_in_bfloat16", lambda fast=fast: fast)
        assert resolve_dtype("auto", float16, torch.device("cpu")) == expected
    with pytest.raises(ValueError, match="not supported on a CPU"):
        resolve_dtype("float16", float16, "cpu")


@pytest.mark.parametrize("variant", ["gemma3", "phi3-window11", "qwen2-tied"])
def test_quantization_computes_logits_of_the_dequantized_model(variant: str, tmp_path: Path) -> None:
    """In float32, weights are dequantized. The vocabulary keeps 8 bits, and its embeddings are scaled."""
    folder = checkpoint(tmp_path, variant, torch.bfloat16)
    for quantization in ("int8", "int4"):
        exact, model = (
            load_model(folder, dtype, "cpu", quantization=quantization) for dtype in ("float32", "bfloat16")
        )
        assert_close(first_logits(model).float(), first_logits(exact), 0.08)
        assert model.weight_bytes < exact.weight_bytes / 2
        table, head = model.embedding, model.lm_head
        assert (table.weight.bits, head.weight.bits) == (8, 8)
        others = model.weight_bytes - sum(linear.nbytes for linear in model.linears)
        assert (others > table.nbytes) == (table is not head)


def test_weights_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen2-tied", torch.bfloat16)
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(torch.nan))
    for quantization in ("int8", "int4"):
        with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight in .*: NaN or infinite values"):
            load_model(folder, "bfloat16", "cpu", quantization=quantization)
    write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    with pytest.raises(ValueError, match=r"m is quantized; omit quantization='int8'"):
        load_model(resolve_model(tmp_path / "m.gguf"), "bfloat16", "cpu", quantization="int8")
