"""Model names are resolved to folders; a missing model is reported with how to get it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec.models import folders as module
from nanospec.models.folders import default_drafter, download, resolve_model


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Create the empty folders that are searched for models, and return them in search order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "checkout" / "nanospec")
    monkeypatch.setattr("sys.argv", ["/usr/bin/nanospec"])
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "run.py").touch()
    folders = {"here": "weights", "named": "named", "checkout": "checkout/weights", "cache": "cache/nanospec"}
    return {name: tmp_path / place for name, place in folders.items()}


def put(folder: Path, name: str) -> Path:
    """Create a minimal model folder and return it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")
    return folder / name


def test_search_order(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in reversed(folders.values()):
        put(folder, "mine")
        assert resolve_model("mine") == folder / "mine"
    other = put(folders["cache"], "org/other")
    assert resolve_model("org/other") == resolve_model(other) == other
    path = put(folders["here"].parent, "mine")
    assert resolve_model("mine").samefile(path)
    monkeypatch.delenv("NANOSPEC_WEIGHTS")
    (folders["checkout"].parent / "run.py").unlink()  # an installed package
    assert module.weights_folders() == [folders["here"], folders["cache"]]
    with pytest.raises(ValueError, match="no drafter found for 'mine'; set draft_model to"):
        default_drafter(Path("mine"))
    for folder in (module.PACKAGE / "weights", folders["cache"] / "drafters", folders["here"] / "drafters"):
        drafter = put(folder, "mine")
        assert default_drafter(Path("mine")) == drafter


def test_download_from_the_hub(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(hub_id: str, *, local_dir: Path | None, **options: Any) -> str:
        assert (options["allow_patterns"], options["ignore_patterns"]) == (module.FILES, module.NOT_FILES)
        return str(local_dir or folders["here"].parent / hub_id)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(module.sys.modules, "huggingface_hub", hub)
    target = put(folders["here"].parent, "target")
    assert download("org/name", target) == target
    with pytest.raises(FileNotFoundError, match=r"be downloaded from the hub \(it has no config\.json\)"):
        resolve_model("org/name")


def test_unknown_models_are_reported(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "download", Mock(side_effect=OSError("unreachable\nmore")))
    put(folders["named"], "mine")
    (folders["named"] / "empty").mkdir()
    (folders["named"] / "gguf").mkdir()
    (folders["named"] / "folder.gguf").mkdir()
    for file in ("gguf/m.gguf", "m.bin"):
        (folders["named"] / file).touch()
    neither = r"it is neither a folder with config\.json nor a GGUF file .*\. Download a model with: nano"
    paths = [str(folders["named"] / name) for name in ("empty", "gguf", "m.bin", "folder.gguf", "n.gguf")]
    messages = dict.fromkeys(["nothing", "org/name-GGUF:Q4_K_M", *paths], neither)
    messages["org/name"] = r"model 'org/name': .* downloaded from the hub \(unreachable more\)\. Download"
    for name, message in messages.items():
        with pytest.raises(FileNotFoundError, match=message):
            resolve_model(name)
    with pytest.raises(ValueError, match="must be a path, or the name or hub id of a model"):
        resolve_model("x" * 1025)
