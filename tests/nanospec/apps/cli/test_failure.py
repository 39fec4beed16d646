"""What nobody expected becomes a sentence, and a file that holds the rest."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from nanospec.apps.cli import failure
from nanospec.apps.cli.main import main


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def fail(argv: list[str]) -> NoReturn:
        raise RuntimeError("it\nbroke " + "x" * 100_000)

    monkeypatch.setattr("nanospec.apps.cli.main._run", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(failure.RAW, raising=False)
    return tmp_path


def test_an_error_is_a_sentence_and_a_file(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt", "a"]) == failure.EXIT_FAILED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 600
    assert "failed, which it should not (RuntimeError: it broke xxx" in said
    [log] = broken.iterdir()
    assert str(log) in said
    assert log.stat().st_mode & 0o777 == 0o600
    text = log.read_text()
    assert re.search(r"nanospec \S+, Python 3\.\d+\.\d+, torch ", text)
    assert "in fail" in text
    assert "Traceback" in text


def test_a_panic_is_one_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Panic(BaseException):
        """As libraries in Rust raise it."""

    def fail(argv: list[str]) -> NoReturn:
        raise Panic("index out of bounds")

    monkeypatch.setattr("nanospec.apps.cli.main._run", fail)
    assert main([]) == failure.EXIT_FAILED
    assert "failed, which it should not (Panic: index out of bounds)" in capsys.readouterr().err


def test_where_no_file_can_be_written_the_traceback_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert main([]) == failure.EXIT_FAILED
    assert "Traceback" in capsys.readouterr().err


def test_the_environment_asks_for_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure.RAW, "1")
    with pytest.raises(RuntimeError, match="broke"):
        main([])
