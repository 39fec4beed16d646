"""A batch on several engines: each line once, whatever dies; texts that do not depend on who wrote them.

The last tests start Ray, and are left out where it is not installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec import SamplingParams
from nanospec.apps.cli.batch import open_batch, run_batch, seeded
from nanospec.apps.cli.batch_lines import LineError, Task
from nanospec.apps.cli.main import main
from nanospec.apps.cli.options import parse, sampling_params
from nanospec.apps.cluster.batch import MOST_LINES, TASKS, grouped, tasks_at_once, write_once
from nanospec.apps.cluster.lines import Result
from tests.nanospec.test_llm import after, folder, make

__all__ = ["folder"]
ROOT = Path(__file__).resolve().parents[4]
SAME = ("--max-model-len", "512", "--dtype", "float32")  # or results would be those of others


def written(*results: Result) -> list[tuple[bytes, int]]:
    found: list[tuple[bytes, int]] = []
    write = lambda line, tokens: found.append((line, tokens))  # noqa: E731
    batch: Any = SimpleNamespace(source="requests.jsonl", write=write)
    write_once(iter(results), batch)
    return found


def test_a_line_that_was_run_twice_is_written_once() -> None:
    twice = [Result(1, b"one\n", 3), Result(0, b"zero\n", 2), Result(1, b"one again\n", 4)]
    assert written(*twice) == [(b"one\n", 3), (b"zero\n", 2)]


def test_what_is_wrong_is_said_in_the_words_of_the_command_line() -> None:
    with pytest.raises(LineError, match=r"requests\.jsonl line 5: too long for --max-model-len 8\."):
        written(Result(4, refused="too long for max_model_len=8."))
    with pytest.raises(ValueError, match="no memory") as caught:
        written(Result(0, failed="no memory"))
    assert not isinstance(caught.value, LineError)


@given(count=st.integers(0, 3 * TASKS))
def test_every_line_is_in_one_task(count: int) -> None:
    every: list[Any] = list(range(count))
    tasks = list(grouped(every))
    assert [line for task in tasks for line in task] == every
    assert {len(task) for task in tasks[:-1]} <= {max(count // TASKS, 1)}


def test_no_result_waits_for_many_others() -> None:
    lines: list[Any] = [None] * (TASKS * MOST_LINES * 2)
    assert max(map(len, grouped(lines[: TASKS + 5]))) == 1
    assert max(map(len, grouped(lines))) == MOST_LINES


@pytest.mark.parametrize(
    ("tasks", "expected"), [(1, 1), (20, 10), (21, 11), (10**6, 128)], ids=["one", "half", "odd", "many"]
)
def test_a_short_batch_is_dealt_out(tasks: int, expected: int) -> None:
    assert tasks_at_once(tasks, 2, 128) == expected


@given(
    counts=st.lists(st.integers(1, 3), max_size=8), done=st.sets(st.integers(0, 7)), seed=st.integers(0, 9)
)
def test_seeds_are_those_of_an_engine_that_runs_all_lines(
    counts: list[int], done: set[int], seed: int
) -> None:
    from nanospec.engine.request import seed_of

    own = {1: 77}  # asked for
    tasks = [Task(i, SamplingParams(n=n, seed=own.get(i)), "x") for i, n in enumerate(counts)]
    number = 0
    for task, params in zip(tasks, seeded(tasks, seed), strict=True):
        for index in range(task.params.n):
            expected = seed_of(task.params.seed, index, seed + 1 + number)
            assert seed_of(params.seed, index, 10**9) == expected
            number += 1


def test_lines_without_a_seed_are_the_same_in_a_batch_that_was_interrupted(
    folder: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": after("a"), "temperature": 100, "max_tokens": 30}] * 4
    target = one_engine(folder, tmp_path, lines)
    whole = texts(target)
    target.write_text("".join(target.read_text().splitlines(keepends=True)[2:]))
    assert len(texts(target)) == 2
    assert texts(one_engine(folder, tmp_path, lines)) == whole
    assert len(set(whole.values())) == 4


def one_engine(folder: Path, where: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """Results of one engine; what is there already is not answered again."""
    source, target = where / "one.jsonl", where / "by-one.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = parse(["--input", str(source), "--output", str(target), *SAME])
    args.folder = folder
    with open_batch(args, sampling_params(args)) as batch:
        run_batch(make(folder, max_model_len=512), batch, "alphabet")
    return target


def texts(path: Path) -> dict[int, Any]:
    """By line; each is there once."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({each["index"] for each in found}) == len(found)
    return {each["index"]: tuple(each["token_ids"]) for each in found}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"prompt": "a" * 300}, "line 2: The prompt has 300 tokens, but --max-model-len 128 must hold it"),
        ({"prompt": [999]}, "line 2: The prompt holds token id 999"),
        (
            {"prompt": "a", "acceptance": "typical"},
            "line 2: acceptance='typical' needs an engine started with --acceptance",
        ),
    ],
    ids=["long", "token", "acceptance"],
)
def test_lines_are_checked_before_ray_starts(
    folder: Path,
    tmp_path: Path,
    line: dict[str, Any],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Ray is being started")

    monkeypatch.setattr("nanospec.apps.cluster.batch.ray_for", start)
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    source.write_text('{"prompt": "a"}\n' + json.dumps(line) + "\n")
    files = ["--input", str(source), "--output", str(target), "--replicas", "2"]
    assert main(["--model", str(folder), *files, "--max-model-len", "128"]) == 2
    assert sentence in capsys.readouterr().err
    assert not target.exists()


def children(pid: int) -> Iterator[tuple[int, str]]:
    """All processes that a process has started, they too, with their names."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), ()):
            todo.append(child)
            with suppress(OSError):
                yield child, Path(f"/proc/{child}/cmdline").read_text()


LINES = [
    {"prompt": after("a"), "temperature": 100 * (i % 3 > 0), "max_tokens": 400, "ignore_eos": True}
    for i in range(16)
]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'nanospec[ray]'")


class Command:
    """`nanospec --input --output --replicas` in a process of its own."""

    def __init__(self, folder: Path, where: Path, replicas: int) -> None:
        source, self.target = where / "requests.jsonl", where / "results.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        options = [*SAME, "--max-num-seqs", "2", "--spec", "none", "--json", "--replicas", str(replicas)]
        files = ["--model", str(folder), "--input", str(source), "--output", str(self.target)]
        command = [sys.executable, "-m", "nanospec", *files, *options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)

    def wait_for(self, lines: int) -> None:
        """Until the results are so many."""
        end = time.monotonic() + 150
        while not self.target.exists() or self.target.read_bytes().count(b"\n") < lines:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)

    def figures(self) -> dict[str, Any]:
        """What it says at the end, which alone is on its standard output."""
        output, errors = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, errors
        figures: dict[str, Any] = json.loads(output)["batch"]
        return figures


@needs_ray
@pytest.mark.ray
def test_every_line_is_there_once_though_a_replica_is_killed(folder: Path, tmp_path: Path) -> None:
    """Six lines are there already, the last of them torn, as by one engine that was killed."""
    expected = one_engine(folder, tmp_path, LINES)
    before = expected.read_bytes().splitlines(keepends=True)[:6]
    (tmp_path / "results.jsonl").write_bytes(b"".join(before)[:-50])
    command = Command(folder, tmp_path, replicas=2)
    command.wait_for(5 + 3)
    replicas = [pid for pid, name in children(command.process.pid) if name.startswith("ray::MapWorker")]
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    assert command.target.read_bytes().count(b"\n") < len(LINES)
    figures = command.figures()
    assert (figures["requests"], figures["done_before"], figures["replicas"]) == (len(LINES), 5, 2)
    assert texts(command.target) == texts(expected)


@needs_ray
@pytest.mark.ray
def test_every_line_is_there_once_though_the_command_is_killed(folder: Path, tmp_path: Path) -> None:
    command = Command(folder, tmp_path, replicas=1)
    command.wait_for(3)
    command.process.kill()
    command.process.communicate()
    assert 3 <= command.target.read_bytes().count(b"\n") < len(LINES)
    assert Command(folder, tmp_path, replicas=1).figures()["done_before"] >= 3
    assert texts(command.target) == texts(one_engine(folder, tmp_path, LINES))
