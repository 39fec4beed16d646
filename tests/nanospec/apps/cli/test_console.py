"""Terminal output: colors only in terminals, aligned tables, and the messages while a model is loaded."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.apps.cli.console import Console, announce, announce_ranks
from nanospec.outputs import Piece


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["drafts", "terminal", "no-color", "file"])
def test_colors_appear_in_terminals_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "no-color":
        monkeypatch.setenv("NO_COLOR", "")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO() if kind == "file" else Terminal()
    console = Console(stream, show_drafts=kind != "terminal")
    console.line("a", "<")
    console.pieces([Piece("b", -1), Piece("", 3), Piece("c", 0), Piece("d", -2)])
    console.table(["", "xx"], [("one", "1")])
    expected = {
        "drafts": "<a\x1b[0m\nb\x1b[32mc\x1b[0m\x1b[32md\x1b[0m\x1b[1m     xx\x1b[0m\none   1\n",
        "terminal": "<a\x1b[0m\nbcd\x1b[1m     xx\x1b[0m\none   1\n",
    }
    assert stream.getvalue() == expected.get(kind, "a\nbcd     xx\none   1\n")


def test_loading_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the model in a terminal only; the memory of ranks if there are several."""
    (tmp_path / "a.safetensors").write_bytes(b"x" * 6_000_000)
    (tmp_path / "other").write_bytes(b"x" * 9_000_000)
    plans = [{"kv_cache": 2_000_000_000, "weights": 1_500_000}] * 2
    for stream, shown in ((Terminal(), "Loading m (0.01 GB) ...\n"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        announce("m", tmp_path)
        for memory in (plans, plans[:1]):
            llm: Any = SimpleNamespace(engine=SimpleNamespace(worker=SimpleNamespace(memory=memory)))
            announce_ranks(llm)
        line = "Rank {} needs 2,001.5 MB: kv cache 2,000.0, weights 1.5.\n"
        assert stream.getvalue() == shown + line.format(0) + line.format(1)
