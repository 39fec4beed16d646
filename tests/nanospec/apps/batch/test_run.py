"""Batch files: parsing of lines, existing and torn results, and errors found before a model is loaded."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.apps.batch.lines import Defaults, LineError, read_tasks
from nanospec.apps.batch.run import (
    batch_summary,
    indices_done,
    open_batch,
    prepare_lines,
    result_prefix,
    results_file,
)
from nanospec.apps.cli.parser import parse
from nanospec.apps.tasks import Task
from nanospec.config import SamplingParams

BREAKS = "a\u2028b\u2029c\x85d"  # where str.splitlines would cut
GREEDY = SamplingParams(temperature=0, max_tokens=256)


def tasks(path: Path | str, **more: Any) -> list[Task]:
    return read_tasks(str(path), Defaults(**{"params": GREEDY, "sampling": {}, **more}))


def tasks_of_lines(folder: Path, *lines: Any, **more: Any) -> list[Task]:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return tasks(path, **more)


def numbered(count: int) -> list[Task]:
    urls = ("", "/v1/completions")  # in turn
    return [Task(i, GREEDY, "x", url=urls[i % 2], key=f"{i:016x}") for i in range(count)]


def result(task: Task) -> str:
    """Return a result line as the program writes it."""
    return (
        result_prefix(task).decode()
        + json.dumps({"text": BREAKS, "stats": {}}, ensure_ascii=False)[1:]
        + "\n"
    )


@pytest.mark.parametrize(
    "text",
    ['{"prompt": "x"}', '\ufeff{"prompt": "x"}\n', '\n{"prompt": "x"}\r\n \n\n', "", "\n"],
    ids=["no-newline", "byte-order-mark", "blank-lines", "empty", "nothing-but-a-newline"],
)
def test_line_endings_are_accepted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text, encoding="utf-8", newline="")
    assert [task.prompt for task in tasks(path)] == (["x"] if "x" in text else [])


def test_only_newlines_separate_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'{{"prompt": "{BREAKS}"}}\r\n{{"prompt":\r"x"}}\n'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert [task.prompt for task in tasks("-")] == [BREAKS, "x"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"prompt": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 12"),
        (b"[" * 99999, "is not valid JSON: nested more than 128 levels deep"),
        (b'{"prompt": "x", "prompt": "y"}', "is not valid JSON: duplicate key 'prompt'"),
        (b'{"prompt": "x", "temperature": NaN}', "is not valid JSON: NaN is not a finite number"),
        (b'{"prompt": "x", "' + b"y" * 10**5 + b'": 1}', "unknown field 'yyyy"),
        (b'{"url": "' + b"y" * 10**5 + b'", "body": {}}', "must be .*not 'yyyy"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b'{"prompt": "x", "messages": []}', 'either "prompt" or "messages"'),
        (b'{"promt": "x"}', r"either .*, got \['promt'\]"),
        (b'{"prompt": "x", "top_P": 1}', "unknown field 'top_P'; did you mean top_p"),
        (b'{"prompt": "x", "xyzzy": 1}', "unknown field 'xyzzy'; known fields are acceptance, custom_id, "),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature='hot' must be a number"),
        (b'{"prompt": [1, true]}', '"prompt" must be a string or a list of token ids'),
        (b'{"messages": [{"role": "user"}]}', 'needs a "role" and a "content"'),
        (b'{"url": "/v1/embeddings", "body": {}}', "must be .*not '/v1/embeddings'"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_invalid_line_is_reported_with_its_number(tmp_path: Path, line: bytes, sentence: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n' + line + b'\n{"prompt": "x"}\n')
    with pytest.raises(LineError, match=rf"requests\.jsonl line 2.*{sentence}") as caught:
        tasks(path)
    assert len(str(caught.value)) < 1000


def test_endless_line_is_rejected_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanospec.apps.batch.lines.MAX_LINE", 1 << 20)
    with pytest.raises(LineError, match=r"/dev/zero line 1 is longer than 1 MB, the limit for a request\."):
        tasks("/dev/zero")
    longest = tmp_path / "requests.jsonl"
    longest.write_bytes(b'{"prompt": "x"}'.ljust(1 << 20))
    assert len(tasks(longest)) == 1


def test_large_file_without_results_is_rejected_early(tmp_path: Path) -> None:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LineError, match=r"image line 1 is not a result of this input"):
        indices_done(path, numbered(3))
    assert path.stat().st_size == 1 << 40


def test_system_message_applies_only_if_conversation_has_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    lines = ({"prompt": "x"}, {"prompt": [1]}, {"messages": own[1:]}, {"messages": own})
    actual = tasks_of_lines(tmp_path, *lines, system="Be brief.")
    expected = [{"role": "system", "content": "Be brief."}, own[1]]
    assert [task.messages for task in actual] == [expected, None, expected, own]
    assert [task.prompt for task in actual] == [None, [1], None, None]


def test_key_depends_on_line_parameters_and_model(tmp_path: Path) -> None:
    line = {"prompt": "x", "custom_id": "a"}

    def keys(*lines: Any, **more: Any) -> list[str]:
        return [task.key for task in tasks_of_lines(tmp_path, *lines, **more)]

    first, second = keys(line, line)
    assert keys(line) == [first]  # appending lines changes no key
    assert keys({"max_tokens": 256, **line}) == [first]  # the default, written out
    others = [
        *keys({**line, "custom_id": "b"}), *keys({**line, "id": "a"}),  # both appear in the result
        *keys({"prompt": "y"}), *keys({**line, "seed": 1}), *keys({"prompt": [1]}), *keys(line, raw=True),
        *keys(line, system="s"), *keys(line, model="m"), *keys(line, params=SamplingParams()), second,
    ]  # fmt: skip
    assert len({first, *others}) == 1 + len(others)


def test_key_depends_on_options_and_model_files(tmp_path: Path) -> None:
    names = ("config.json", "chat_template.jinja", "model.safetensors")
    for name in names:
        (tmp_path / name).write_text("{}")
    options = ("", "--dtype=float32", "--max-model-len=64", "--acceptance=typical", *names)
    keys = list[str]()
    for change in (*options, "--num-speculative-tokens=2"):
        given_too = [change] if change.startswith("--") else []
        if change in names:
            (tmp_path / change).write_text("{ }")
        args = parse(["--input", "x", "--output", "y", *given_too])
        args = argparse.Namespace(**{**vars(args), **vars(arguments(tmp_path))})
        with open_batch(args, GREEDY) as batch:
            keys.append(batch.tasks[0].key)
    assert len(set(keys[:-1])) == len(options)
    assert keys[-1] == keys[-2]  # K does not change results


@given(length=st.integers(0, 90), torn=st.integers(0, 3))
def test_torn_result_is_truncated(tmp_path_factory: pytest.TempPathFactory, length: int, torn: int) -> None:
    path, every = tmp_path_factory.mktemp("torn") / "results.jsonl", numbered(6)
    whole = result(every[4]) + result(every[5])
    rest = result(every[torn])[:-1].encode()[:length]
    path.write_bytes(whole.encode() + rest)
    assert indices_done(path, every) == {4, 5}
    assert path.read_text(encoding="utf-8") == whole


NO_RESULTS = {
    "text": "my only notes",
    "json": '{"prompt": "x"}',
    "other-json": '{"index": 0, "prompt": "x"}\n',
    "text-after-results": result(numbered(1)[0]) + "my notes",
    "blank-line": result(numbered(1)[0]) + "\n",
    "same-twice": result(numbered(1)[0]) * 2,
    "not-whole": result_prefix(numbered(1)[0]).decode() + "\n",
    "no-key": '{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}\n',
    "another-key": result(Task(0, GREEDY, key="f" * 16)),
    "another-index": result(Task(7, GREEDY, key=f"{0:016x}")),
    "torn-of-another": result(Task(0, GREEDY, key="f" * 16))[:60],
}


@pytest.mark.parametrize("content", NO_RESULTS.values(), ids=list(NO_RESULTS))
def test_files_without_results_are_rejected_unchanged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(LineError, match=r"notes(: the last line| line \d+) is .*; use another output\."):
        indices_done(path, numbered(3))
    assert path.read_text(encoding="utf-8") == content


def arguments(folder: Path, **more: Any) -> argparse.Namespace:
    """Return the parsed command line, with a one-line request file unless `more` replaces it."""
    source = folder / "requests.jsonl"
    source.write_text('{"prompt": "x"}\n')
    files = {"input": str(source), "output": str(folder / "results.jsonl"), "folder": folder}
    return argparse.Namespace(**{**files, "system": None, "raw": False, **more})


@pytest.mark.parametrize(("option", "name"), [("input", "none"), ("output", "none/x"), ("output", "")])
def test_unusable_file_is_reported_at_start(tmp_path: Path, option: str, name: str) -> None:
    file = str(tmp_path / name)
    with pytest.raises(OSError) as caught, open_batch(arguments(tmp_path, **{option: file}), GREEDY):
        pass
    assert caught.value.filename == file
    assert not (tmp_path / "results.jsonl").exists()


def test_input_and_output_must_differ(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    os.symlink(args.input, args.output)
    with pytest.raises(ValueError, match="are the same file; use another output"), open_batch(args, GREEDY):
        pass
    assert Path(args.input).read_text() == '{"prompt": "x"}\n'


def test_output_locked_by_another_process_is_rejected(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    busy = pytest.raises(ValueError, match="another process is writing .*use another output")
    with results_file(args.output), busy, open_batch(args, GREEDY):
        pass
    with open_batch(args, GREEDY) as batch:  # the lock was released
        assert (batch.todo, batch.done) == (batch.tasks, set())
        batch.file.write(result(batch.tasks[0]).encode())
    with open_batch(args, GREEDY) as batch:
        assert (batch.todo, batch.done) == ([], {0})


@pytest.mark.parametrize("before", [None, b""], ids=["new", "there"])
@pytest.mark.parametrize("written", [b"", b"x"], ids=["nothing", "a-result"])
def test_failure_before_first_result_leaves_no_new_file(
    tmp_path: Path, before: bytes | None, written: bytes
) -> None:
    args = arguments(tmp_path)
    target = Path(args.output)
    if before is not None:
        target.write_bytes(before)

    def run() -> None:
        with open_batch(args, GREEDY) as batch:
            batch.file.write(written)
            raise LineError("refused by the model")

    with pytest.raises(LineError, match="refused"):
        run()
    assert (target.read_bytes() if target.exists() else None) == (written or before)


def test_filesystem_without_locks_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with results_file(str(tmp_path / "results.jsonl")) as file:
        file.write(b"x")


def test_written_results_are_counted(tmp_path: Path) -> None:
    with open_batch(arguments(tmp_path), GREEDY) as batch, batch.running():
        batch.write(b"x", 3)
        batch.write(b"y", 4)
    assert (batch.written, batch.tokens) == (2, 7)


class Letters:
    """A tokenizer with a chat template."""

    has_chat_template = True

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{message['content']}>" for message in messages)

    def encode_prompt(self, text: str, window: int, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


@pytest.mark.parametrize(("raw", "of_text"), [(False, [60, 97, 62]), (True, [0, 97])])
def test_prompts_use_chat_template_unless_raw(tmp_path: Path, raw: bool, of_text: list[int]) -> None:
    source, tokenizer = tmp_path / "lines", Letters()
    source.write_text('{"prompt": "a"}\n{"prompt": [7, 8]}\n')
    with open_batch(arguments(tmp_path, input=str(source), raw=raw), GREEDY) as batch:
        lines = prepare_lines(batch, tokenizer, lambda *_: None, 64, 0)  # type: ignore[arg-type]
    assert [ids for _, ids, _ in lines] == [of_text, [7, 8]]


def test_batch_summary() -> None:
    statistics = {"requests": 21, "done_before": 1, "seconds": 9.87, "tokens_per_second": 160.2}
    assert batch_summary(statistics) == "20 requests in 9.9 s, 160 tok/s; 1 already had results"
    assert batch_summary({**statistics, "done_before": 21}) == "All requests already have results."
