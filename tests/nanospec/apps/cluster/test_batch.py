"""A batch on several engines: every line is answered once despite crashes, whichever replica runs it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec import SamplingParams
from nanospec.apps.batch.lines import LineError
from nanospec.apps.batch.run import open_batch, run_batch
from nanospec.apps.cli.main import main
from nanospec.apps.cli.parser import DEFAULTS, parse
from nanospec.apps.cluster.batch import LineEngine
from nanospec.apps.cluster.start import Bundle, load
from nanospec.apps.tasks import Task
from tests.alphabet import after, make

ROOT = Path(__file__).resolve().parents[4]
SAME = ("--max-model-len", "512", "--dtype", "float32")  # results depend on these


def test_lines_are_checked_before_any_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step ends the process. Ray then runs its lines on another replica."""
    options = {"max_num_seqs": 4, "dtype": "float32", "max_model_len": 128}
    engine = LineEngine(partial(load, folder, "", Bundle(1, 0, 1), options), "alphabet")
    tasks = [Task(i, SamplingParams(max_tokens=4, n=3), "a" * size) for i, size in enumerate((9, 200))]

    async def answer() -> tuple[bytes, int]:
        [line] = await engine.prepare("in.jsonl", tasks, {1})
        return await engine.answer(*line)

    refused = pytest.raises(
        LineError, match="in.jsonl line 2: The prompt has 200 tokens, but --max-model-len"
    )
    with refused:
        asyncio.run(engine.prepare("in.jsonl", tasks, set()))
    monkeypatch.setattr(engine.llm.engine, "step", None)
    monkeypatch.setattr(os, "_exit", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        asyncio.run(answer())


def test_missing_ray_is_reported(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    source.write_text('{"prompt": "a"}')
    files = ["--input", str(source), "--output", str(target), "--replicas", "2"]
    monkeypatch.setattr("nanospec.apps.cluster.batch.need_ray", lambda module: None)
    monkeypatch.setattr("nanospec.apps.cluster.batch.connect_ray", Mock(side_effect=OSError("no Ray")))
    assert main(["--model", str(folder), *files, "--max-model-len", "128"]) == 2
    assert "no Ray" in capsys.readouterr().err
    assert not target.exists()


def children(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the pid and command line of every descendant of a process."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
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


def on_ray(test: Any) -> Any:
    """Mark a test that starts Ray."""
    reason = "needs Ray: pip install 'nanospec[ray]'"
    return pytest.mark.skipif(find_spec("ray") is None, reason=reason)(pytest.mark.ray(test))


def texts(path: Path) -> dict[int, Any]:
    """Return the token ids by line, checking that each line appears once."""
    result = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({each["index"] for each in result}) == len(result)
    return {each["index"]: tuple(each["token_ids"]) for each in result}


@on_ray
def test_each_line_written_once_after_replica_killed(folder: Path, tmp_path: Path) -> None:
    """The output starts with six lines of a killed run, of which the last is incomplete."""
    source, target, expected = (tmp_path / name for name in ("requests", "results", "expected"))
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    args = parse(["--input", str(source), "--output", str(expected), *SAME])
    args.folder = folder
    with open_batch(args, SamplingParams(temperature=0, **DEFAULTS)) as batch:
        run_batch(make(folder, max_model_len=512), batch, "alphabet")
    target.write_bytes(b"".join(expected.read_bytes().splitlines(keepends=True)[:6])[:-50])
    files = ["--model", str(folder), "--input", str(source), "--output", str(target)]
    options = [*SAME, "--max-num-seqs", "2", "--spec", "none", "--json", "--replicas", "2"]
    command = [sys.executable, "-m", "nanospec", *files, *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)
    end = time.monotonic() + 150
    while target.read_bytes().count(b"\n") < 5 + 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    replicas = [pid for pid, name in children(process.pid) if name.startswith("ray::LineEngine")]
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    assert target.read_bytes().count(b"\n") < len(LINES)
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    statistics = json.loads(output)["batch"]  # the only text on standard output
    assert (statistics["requests"], statistics["done_before"]) == (len(LINES), 5)
    assert texts(target) == texts(expected)
