"""Batch files: parsing of lines, existing and torn results, and errors found before a model is loaded."""

import argparse
import fcntl
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.apps.batch import run
from nanospec.apps.batch.lines import Defaults, LineError, read_tasks, result_prefix
from nanospec.apps.batch.run import indices_done, open_batch, prepare_lines
from nanospec.apps.cli.parser import parse
from nanospec.apps.tasks import Task
from nanospec.config import SamplingParams
from nanospec.engine.request import derive_seed

BREAKS = "a\u2028b\u2029c\x85d"  # where str.splitlines would cut
GREEDY = SamplingParams(temperature=0, max_tokens=256)


def tasks(path: Path | str, **more: Any) -> list[Task]:
    return read_tasks(str(path), Defaults(**{"params": GREEDY, **more}))


def tasks_of_lines(folder: Path, *lines: Any, **more: Any) -> list[Task]:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return tasks(path, **more)


def numbered(count: int) -> list[Task]:
    urls = ("", "/v1/completions")  # in turn
    return [Task(i, GREEDY, "x", url=urls[i % 2], key=f"{i:016x}") for i in range(count)]


def result(task: Task) -> str:
    """Return a result line as the program writes it."""
    rest = json.dumps({"text": BREAKS, "stats": {}}, ensure_ascii=False)
    return f"{result_prefix(task).decode()}{rest[1:]}\n"


@pytest.mark.parametrize(
    "text", [f'\ufeff{{"prompt": "{BREAKS}"}}', f'\n{{"prompt":\r"{BREAKS}"}}\r\n \n\n', "\ufeff\n"]
)
def test_only_newlines_separate_lines(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    for source in (path, "-"):
        assert [task.prompt for task in tasks(source)] == ([BREAKS] if "prompt" in text else [])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"prompt": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 12"),
        (b'{"prompt": "x", "' + b"y" * 10**5 + b'": 1}', "unknown field 'yyyy"),
        (b"{}", 'either "prompt" or "messages"\\.$'),
        (b'{"prompt": "x", "messages": []}', "either .*, got \\['prompt', 'messages'\\]"),
        (b'{"prompt": "x", "custom": 1}', "unknown field 'custom'; did you mean custom_id"),
        (b'{"prompt": [1, true]}', '"prompt" must be a string or a list of token ids'),
        (b'{"prompt": "\\ud800"}', '"prompt" contains an unpaired surrogate'),
        (b'{"url": "/v1/completions", "body": 1}', '"body" must be a JSON object'),
    ],
    ids=range(8),
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


def test_system_message_applies_only_if_conversation_has_none(tmp_path: Path) -> None:
    own = [{"role": "developer", "content": "own"}, {"role": "user", "content": "x"}]
    lines = ({"prompt": "x"}, {"prompt": [1]}, {"messages": own[1:]}, {"messages": own})
    expected = [{"role": "system", "content": "Be brief."}, own[1]]
    actual = [(task.prompt, task.messages) for task in tasks_of_lines(tmp_path, *lines, system="Be brief.")]
    assert actual == [(None, expected), ([1], None), (None, expected), (None, own)]
    [raw] = tasks_of_lines(tmp_path, lines[0], system="Be brief.", raw=True)
    assert (raw.prompt, raw.messages, raw.raw) == ("x", None, True)


def test_key_depends_on_line_parameters_and_model(tmp_path: Path) -> None:
    line = {"prompt": "x", "custom_id": "a"}

    def keys(*lines: Any, **more: Any) -> list[str]:
        return [task.key for task in tasks_of_lines(tmp_path, *lines, **more)]

    first, second = keys(line, line)
    assert keys(line) == [first]  # appending lines changes no key
    assert keys({"max_tokens": 256, **line}) == [first]  # the default, written out
    changes = ({"custom_id": "b"}, {"id": "a"}, {"prompt": "y"}, {"prompt": [1]}, {"seed": 1})
    others = [key for change in changes for key in keys({**line, **change})]
    for more in ({"raw": True}, {"system": "s"}, {"model": "m"}, {"params": SamplingParams()}):
        others += keys(line, **more)
    assert len({first, second, *others}) == 2 + len(others)


def arguments(folder: Path, *options: str, **more: Any) -> argparse.Namespace:
    """Return the parsed command line, with a one-line request file unless `more` replaces it."""
    source = folder / "requests.jsonl"
    source.write_text('{"prompt": "x"}\n')
    args = parse(["--input", str(source), "--output", str(folder / "results.jsonl"), *options])
    return argparse.Namespace(**{**vars(args), "folder": folder, **more})


def test_key_depends_on_options_and_model_files(tmp_path: Path) -> None:
    names = ("config.json", "chat_template.jinja", "model.safetensors", "model.gguf")
    for name in names:
        (tmp_path / name).write_text("{}")
    options = (
        "--raw",
        "--dtype=float32",
        "--quantization=int4",
        "--max-model-len=64",
        "--acceptance=typical",
        *names,
    )
    keys = list[str]()
    for change in ("--raw", *options[1:], "--num-speculative-tokens=2", "--spec=none"):
        if change in names:
            (tmp_path / change).write_text("{ }")
        with open_batch(arguments(tmp_path, *([change] * (change not in names))), GREEDY) as batch:
            keys.append(batch.tasks[0].key)
    assert len(set(keys[:-2])) == len(options)
    assert keys[-3:] == keys[-1:] * 3  # speculation does not change results


@settings(max_examples=50)
@given(length=st.integers(0, 90), torn=st.integers(0, 3))
def test_torn_result_is_truncated(tmp_path_factory: pytest.TempPathFactory, length: int, torn: int) -> None:
    path, every = tmp_path_factory.mktemp("torn") / "results.jsonl", numbered(6)
    whole = result(every[4]) + result(every[5])
    rest = result(every[torn])[:-1].encode()[:length]
    path.write_bytes(whole.encode() + rest)
    assert indices_done(path, every) == {4, 5}
    assert path.read_text(encoding="utf-8") == whole


NO_RESULTS = {
    "text": "my only notes", "text-after-results": result(numbered(1)[0]) + "my notes",
    "same-twice": result(numbered(1)[0]) * 2, "not-whole": result_prefix(numbered(1)[0]).decode() + "\n",
    "no-key": '{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}\n',
    "another-key": result(Task(0, GREEDY, key="f" * 16)),
    "torn-of-another": result(Task(0, GREEDY, key="f" * 16))[:60],
}  # fmt: skip


@pytest.mark.parametrize("name", NO_RESULTS)
def test_files_without_results_are_rejected_unchanged(tmp_path: Path, name: str) -> None:
    path = tmp_path / "notes"
    path.write_text(NO_RESULTS[name], encoding="utf-8")
    with pytest.raises(LineError, match=r"notes line \d is not a result .*; use another output\."):
        indices_done(path, numbered(3))
    assert path.read_text(encoding="utf-8") == NO_RESULTS[name]


def test_unusable_file_is_reported_at_start(tmp_path: Path) -> None:
    for option, name in (("input", "none"), ("output", "none/x"), ("output", "")):
        file = str(tmp_path / name)
        with pytest.raises(OSError) as caught, open_batch(arguments(tmp_path, **{option: file}), GREEDY):
            pass
        assert caught.value.filename == file
        assert not (tmp_path / "results.jsonl").exists()


def test_output_must_be_neither_input_nor_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    os.symlink(args.input, args.output)
    with pytest.raises(ValueError, match="line 1 is not a result .* use another"), open_batch(args, GREEDY):
        pass
    assert Path(args.input).read_text() == '{"prompt": "x"}\n'
    os.unlink(args.output)
    busy = pytest.raises(ValueError, match="another process is writing .*use another output")
    with run.results_file(args.output), busy, open_batch(args, GREEDY):
        pass
    with open_batch(args, GREEDY) as batch:  # the lock was released
        assert (batch.todo, batch.done) == (batch.tasks, set())
        batch.file.write(result(batch.tasks[0]).encode())
    with open_batch(args, GREEDY) as batch:
        assert (batch.todo, batch.done) == ([], {0})
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError))  # as on some file systems
    with open_batch(args, GREEDY) as batch:
        assert batch.done == {0}


def test_failure_before_first_result_leaves_no_new_file(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    target = Path(args.output)
    for before, written, after in ((None, b"", None), (b"", b"", b""), (None, b"x", b"x"), (b"", b"x", b"x")):
        target.unlink(missing_ok=True)
        if before is not None:
            target.write_bytes(before)
        with suppress(LineError), open_batch(args, GREEDY) as batch:
            batch.file.write(written)
            raise LineError("refused by the model")
        assert (target.read_bytes() if target.exists() else None) == after


class Disk(io.BytesIO):
    """A file that writes two bytes at a time."""

    def write(self, data: Any) -> int:
        return super().write(data[:2])


def test_results_are_written_whole_and_counted() -> None:
    batch = run.Batch("lines", "results", numbered(3), {1}, Disk())
    with batch.running():
        batch.write(b"xyz", 3)
    assert batch.file.getvalue() == b"xyz"  # type: ignore[attr-defined]
    batch.seconds = 1.23456
    figures = {"requests": 3, "done_before": 1, "seconds": 1.235, "tokens": 3, "tokens_per_second": 2.4}
    assert batch.statistics() == figures


@pytest.mark.parametrize(
    ("raw", "template", "of_text"),
    [(False, True, [60, 97, 62]), (True, True, [0, 97]), (False, False, [0, 97])],
)
def test_lines_are_checked_and_get_prompts_and_seeds(
    tmp_path: Path, raw: bool, template: bool, of_text: list[int]
) -> None:
    """The chat template is applied to text unless it is raw. Seeds are those of one engine's requests."""
    checked, source = [], tmp_path / "lines"

    def check(ids: list[int], params: SamplingParams) -> SamplingParams:
        checked.append(ids)
        if len(checked) > 3:
            raise ValueError("max_model_len=3 is low.")
        return params

    tokenizer = SimpleNamespace(
        has_chat_template=template,
        apply_chat_template=lambda messages, end=">": f"<{messages[0]['content']}{end}",
        encode_prompt=lambda text, _, add_special_tokens=True: [0] * add_special_tokens + [*map(ord, text)],
    )
    engine, config = SimpleNamespace(max_model_len=64, check=check), SimpleNamespace(seed=3)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, engine=engine, config=config)
    message = '{"messages": [{"role": "user", "content": "b"}], "chat_template_kwargs": {"end": "]"}}'
    source.write_text(f'{{"prompt": [7, 8], "n": 2}}\n{{"prompt": "a", "seed": 5}}\n{message}\n')
    every = tasks(source, raw=raw)
    lines = prepare_lines("lines", every, set(), llm)
    assert [ids for _, ids in lines] == [[7, 8], of_text, [60, 98, 93]] == checked
    numbers = {(0, 0): 4, (0, 1): 5, (1, 0): 6, (2, 0): 7}  # of the requests of an engine with seed 3
    for (line, index), number in numbers.items():
        seed = {1: 5}.get(line)
        assert derive_seed(every[line].params.seed, index, 0) == derive_seed(seed, index, number)
    with pytest.raises(LineError, match=r"lines line 3: --max-model-len 3 is low\."):
        prepare_lines("lines", every, {0, 1}, llm)
