"""JSON lines in and out: what counts as a line, as a result, and as torn; nothing else is touched."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.cli.jsonl import finished_lines, locked, read_requests, run_batch
from nanospec.config import SamplingParams

BREAKS = "a\u2028b\u2029c\x85d"  # where str.splitlines would cut
LLM: Any = SimpleNamespace(
    tokenizer=SimpleNamespace(encode=lambda text: list(text.encode())),
    engine=SimpleNamespace(check=lambda ids, params: None),
)


def result(index: object, **more: object) -> str:
    """A line as the program writes it."""
    line = {"index": index, "text": BREAKS, "token_ids": [1], "finish_reason": "stop", "stats": {}, **more}
    return json.dumps(line, ensure_ascii=False) + "\n"


def prompts(path: Path) -> list[str]:
    return [bytes(ids).decode() for ids, _ in read_requests(LLM, path, SamplingParams())]


@pytest.mark.parametrize(
    "text",
    ['{"prompt": "x"}', '{"prompt": "x"}\n', '\ufeff{"prompt": "x"}\n', '{"prompt": "x"}\r\n \n\n', "", "\n"],
    ids=["no-newline", "newline", "byte-order-mark", "blank-lines", "empty", "nothing-but-a-newline"],
)
def test_where_lines_end(tmp_path: Path, text: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text, encoding="utf-8", newline="")
    assert prompts(path) == (["x"] if "x" in text else [])


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "{BREAKS}"}}\r\n{{"prompt":\r"x"}}\n', encoding="utf-8", newline="")
    assert prompts(path) == [BREAKS, "x"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"", "is empty"),
        (b" ", "is empty"),
        (b'{"prompt": "\xff"}', "can't decode"),
        (b"[" * 99999, "recursion"),
    ],
    ids=["empty", "blank", "no-utf8", "deep"],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, sentence: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n' + line + b'\n{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=rf"requests\.jsonl line 2.*{sentence}"):
        read_requests(LLM, path, SamplingParams())


@pytest.mark.parametrize("length", [0, 1, 5, 9, 10, 11, 12, 20, 25, 60])
def test_a_torn_result_is_cut_off(tmp_path: Path, length: int) -> None:
    path, torn = tmp_path / "results.jsonl", result(12)[:length].encode()
    path.write_bytes((result(3) + result(0)).encode() + torn)
    assert finished_lines(path, 13) == {0, 3}
    assert path.read_text(encoding="utf-8") == result(3) + result(0)


@pytest.mark.parametrize(
    "content",
    [
        "my only notes",
        '{"prompt": "x"}',
        '{"index": 0, "prompt": "x"}',
        '{"index": "0", "text": "x"',
        result(0) + "my notes",
        result(0) + "\n",
        result(0) + result(0),
        result("1"),
        result(0.7),
        result(True),
        result(-1),
        result(0).replace("stats", "index"),
        '{"index": 0}\n',
        '[["index", 0], ["text", ""], ["token_ids", []], ["finish_reason", "stop"]]\n',
        "7\n",
        "[" * 99999 + "\n",
    ],
    ids=[
        "text", "json", "other-json", "torn-index-of-text", "text-after-results", "blank-line", "same-index",
        "index-of-text", "index-of-float", "index-of-bool", "negative", "name-twice", "index-only", "array",
        "number", "deep",
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"notes (line \d+ is|ends with what is) .*; name another output\."):
        finished_lines(path, 9)
    assert path.read_text(encoding="utf-8") == content


def test_results_of_a_longer_input_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results").write_text(result(3), encoding="utf-8")
    with pytest.raises(ValueError, match="holds the result of index 3, but the input has 3 lines"):
        finished_lines(tmp_path / "results", 3)


@pytest.mark.parametrize("link", [os.symlink, os.link, None], ids=["symlink", "hard-link", "same-name"])
def test_the_input_is_never_the_output(tmp_path: Path, link: Any) -> None:
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    source.write_text('{"prompt": "x"}')
    if link is None:
        target = tmp_path / "." / source.name
    else:
        link(source, target)
    with pytest.raises(ValueError, match="are the same file; name another output"):
        run_batch(LLM, str(source), str(target), SamplingParams())
    assert source.read_text() == '{"prompt": "x"}'


def test_an_output_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    source.write_text('{"prompt": "x"}\n')
    with locked(str(target)), pytest.raises(ValueError, match="another process writes .*name another output"):
        run_batch(LLM, str(source), str(target), SamplingParams())
    with locked(str(target)):  # given back
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(str(tmp_path / "results.jsonl")) as file:
        file.write(b"x")
