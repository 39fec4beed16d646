"""A trace as data and as a file: text is escaped, and only trace files are overwritten."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.extras.tracing.trace import Trace, check_target, embedded
from tests.nanospec.extras.tracing.examples import NASTY, example


def data_in(html: str) -> Any:
    [data] = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner)))
def test_embedded_data_is_escaped(data: Any) -> None:
    text = embedded(data)
    assert json.loads(text) == data
    assert re.search(r"[<>&\u2028\u2029\x00]|[^\x20-\x7e]", text) is None


def test_page_is_self_contained() -> None:
    trace = example(texts=NASTY)
    html = trace.html()
    assert data_in(html) == json.loads(json.dumps(trace.to_dict()))
    assert html.count("</script>") == 2
    code = html.replace("http://www.w3.org/2000/svg", "")  # an XML namespace, not a URL
    assert re.search(r"https?:|src=|@import|url\(|href=|fetch\(|import\(", code) is None
    assert "/* scripts */" not in html
    assert "/* page.css */" not in html


def test_numbers_are_rounded() -> None:
    trace = example()
    trace.lanes[0].seconds = 1.23456789
    assert trace.to_dict()["lanes"][0]["seconds"] == 1.235


def test_only_trace_pages_are_overwritten(tmp_path: Path) -> None:
    page, notes = tmp_path / "trace.html", tmp_path / "notes.txt"
    example().save(page)
    first = page.read_text()
    example(texts=["x"]).save(page)
    assert page.read_text() != first
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]
    notes.write_text("mine")
    for path, what in (
        (notes, "is not an HTML file"),
        (tmp_path, "is a directory; specify a file"),
        (tmp_path / "no" / "x.html", "The directory .* does not exist"),
    ):
        with pytest.raises(ValueError, match=what):
            check_target(path)
        with pytest.raises(ValueError, match=what):
            example().save(path)
    assert notes.read_text() == "mine"


def test_unwritable_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "trace.html"
    example().save(page)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for path in (page, tmp_path / "new.html"):
        with pytest.raises(ValueError, match=f"{path} is not writable; specify another file for the trace"):
            check_target(path)
    check_target("/dev/null")


def test_failed_save_keeps_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "trace.html"
    page.write_text("<!doctype html>old")
    monkeypatch.setattr(Trace, "html", lambda self: "\ud800")  # not encodable as UTF-8
    with pytest.raises(UnicodeEncodeError):
        example().save(page)
    assert page.read_text() == "<!doctype html>old"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]
