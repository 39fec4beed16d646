"""`nanospec convert`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nanospec.apps.cli import convert
from nanospec.models import gguf
from nanospec.models.hub import resolve_model
from tests.gguf_file import write_gguf


def test_command_line_publishes_whole_folders_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")
    source, target = str(tmp_path / "m.gguf"), tmp_path / "out" / "m"
    assert convert.main([source, str(target)]) == 0
    assert resolve_model(target) == target
    assert convert.main([source, str(target)]) == 1
    assert "exists already; give another folder or --force" in capsys.readouterr().err
    assert convert.main([source, str(target), "--force"]) == 0

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "write_safetensors", interrupted)
    assert convert.main([source, str(tmp_path / "out" / "other")]) == 130
    assert convert.main([str(tmp_path / "none.gguf"), str(tmp_path / "out" / "other")]) == 1
    assert "none.gguf does not exist" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["m"]


def test_without_a_folder_the_model_goes_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "mine.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path / "models"))
    assert convert.main([str(tmp_path / "mine.gguf"), "--dtype", "float32"]) == 0
    assert resolve_model("mine") == tmp_path / "models" / "mine"


def test_the_library_that_reads_gguf_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "nanospec.models.gguf")
    assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / "m")]) == 1
    assert "needs the gguf library: pip install gguf" in capsys.readouterr().err
