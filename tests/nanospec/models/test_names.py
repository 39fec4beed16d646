"""Model names are resolved to folders; a missing model is reported with how to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanospec import models
from nanospec.models import available_models, default_heads, resolve_model


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The empty folders that are searched for models, in search order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "PACKAGE", tmp_path / "checkout" / "nanospec")
    monkeypatch.setattr("sys.argv", ["/usr/bin/nanospec"])
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "run.py").touch()
    places = {"here": "weights", "named": "named", "checkout": "checkout/weights", "cache": "cache/nanospec"}
    return {name: tmp_path / place for name, place in places.items()}


def put(folder: Path, name: str) -> Path:
    """Create a minimal model folder and return it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")
    return folder / name


def test_resolve_model_search_order(places: dict[str, Path]) -> None:
    for folder in reversed(places.values()):
        put(folder, "mine")
        assert resolve_model("mine") == folder / "mine"
    other = put(places["cache"], "org/other")
    assert resolve_model("org/other") == other
    assert resolve_model(other) == other
    assert available_models() == ["mine", "org/other"]
    path = put(places["here"].parent, "mine")
    assert resolve_model("mine").samefile(path)


def test_default_heads_search_order(places: dict[str, Path]) -> None:
    with pytest.raises(FileNotFoundError, match="train them with: nanospec train --model mine"):
        default_heads(Path("mine"))
    for folder in (models.PACKAGE, places["cache"], places["here"]):
        (folder / "heads").mkdir(parents=True)
        (folder / "heads" / "mine.safetensors").touch()
        assert default_heads(Path("mine")) == folder / "heads" / "mine.safetensors"


@pytest.mark.parametrize(
    ("started", "typed"),
    [("bin/nanospec", "nanospec"), ("run.py", "python run.py"), ("mine.py", "python -m nanospec")],
)
def test_messages_name_the_invoked_command(started: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [started])
    with pytest.raises(FileNotFoundError, match=f"Download one with: {typed} fetch NAME"):
        resolve_model("nothing")


def test_resolve_model_errors(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "download", lambda name: (_ for _ in ()).throw(OSError("unreachable\nmore")))
    put(places["named"], "mine")
    (places["named"] / "empty").mkdir()
    (places["named"] / "m.gguf").touch()
    for name, message in {
        "nothing": r"unknown model 'nothing': .* models: mine\. Download one with: nanospec fetch NAME",
        "": "unknown model ''",
        "org/name": r"unknown model 'org/name': .* downloaded from the hub \(unreachable more\)\. Available",
        str(places["named"] / "empty"): r"has no config\.json",
        str(places["named"] / "m.gguf"): r"is a file, .* convert it: nanospec convert FILE FOLDER",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            resolve_model(name)
