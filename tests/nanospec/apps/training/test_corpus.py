"""Text of the target's own: loops are cut, an interrupted run goes on to the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanospec import LLM, SpecConfig
from nanospec.apps.training.corpus import before_loop, read_prompts, variety, write_texts
from tests.nanospec.apps.training.conftest import TEMPLATE


def open_llm(folder: Path) -> LLM:
    return LLM(folder, spec=SpecConfig(method="none"), dtype="float32")


def lines_left(folder: Path, torn: bytes = b"") -> None:
    """As a run that was killed would have left it: the last file has few lines and perhaps a torn one."""
    file = sorted(folder.glob("*.jsonl"))[-1]
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]) + torn)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_text_goes_on_to_the_same_text(folder: Path, tmp_path: Path, given: bool) -> None:
    prompts = ["abc", [{"role": "user", "content": "Hi"}]] if given else None
    amount = 100 if given else 1000
    llm = open_llm(folder)
    expected = write_texts(llm, tmp_path / "text", amount, 3, prompts)
    written = sum(len(text.ids) - text.user for texts in expected for text in texts)
    assert written >= amount
    assert len(expected) > 1
    for text in (text for texts in expected for text in texts):
        assert 0 <= text.user <= text.answer < len(text.ids)
    for number in (1, 0):
        for file in (tmp_path / "text").glob(f"*-{number + 1:04}.jsonl"):
            file.unlink()
        lines_left(tmp_path / "text", b'{"index": 3, "ids": [1,')
        assert write_texts(llm, tmp_path / "text", amount, 3, prompts) == expected
    assert write_texts(llm, tmp_path / "other", 1, 4, prompts)[0] != expected[0]


@pytest.mark.usefixtures("small")
def test_a_user_without_a_system_prompt(folder: Path, tmp_path: Path) -> None:
    """Some templates refuse system prompts; the text then does without."""
    refusing = tmp_path / "refusing"
    refusing.mkdir()
    for file in folder.iterdir():
        (refusing / file.name).write_bytes(file.read_bytes())
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (refusing / "chat_template.jinja").write_text(refusal + TEMPLATE)
    assert write_texts(open_llm(refusing), tmp_path / "text", 20)


def test_loops_are_found() -> None:
    prose = [(i * i) % 211 for i in range(150)]
    assert variety(prose) > 0.9 > 0.2 > variety([1, 2, 3] * 50)
    assert before_loop(prose) == 150
    assert before_loop([1, 2, 3] * 50) == 0
    assert 64 <= before_loop(prose[:100] + [1, 2, 3] * 50) <= 100


def test_prompts_are_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    lines = ['{"prompt": "a\u2028b"}', json.dumps({"messages": messages})]  # U+2028 ends no line
    file.write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    assert read_prompts(file) == ["a\u2028b", messages]
    for line, sentence in (
        ("", "is empty; a line is"),
        ("{", "line 1 is not JSON"),
        ('{"text": "a"}', 'line 1 must be {"prompt": text} or'),
        ('{"prompt": ""}', "must be a text"),
        ('{"messages": "a"}', "a list, not empty"),
    ):
        file.write_text(line)
        with pytest.raises(ValueError, match=sentence):
            read_prompts(file)
