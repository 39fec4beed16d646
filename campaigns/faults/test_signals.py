"""Test SIGINT, SIGTERM, SIGHUP and SIGKILL, also repeated, at random moments of real processes, from startup
to exit. `make faults` runs each command RUNS (20) times."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM

import pytest

from campaigns.faults.signals import NOISE, STARTUP_ERROR, End, Sandbox
from tests.alphabet import folder
from tests.nanospec.extras.tensor_parallel.test_launcher import assert_gone, random_model

__all__ = ["folder"]
pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]
RUNS = int(os.environ.get("RUNS", "20"))
SIGNALS = [[SIGINT], [SIGINT] * 2, [SIGINT] * 2, [SIGINT] * 3, [SIGTERM], [SIGTERM] * 2, [SIGHUP], [SIGKILL]]
SMALL: list[object] = ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", 4]
LONG: list[object] = ["--max-tokens", 300, "--ignore-eos"]
BATCH: list[object] = ["--input", "in.jsonl", "--output", "out.jsonl", "--raw"]
WAYS: dict[str, list[object]] = {
    "prompt": ["--prompt", "abcab", *LONG],
    "batch": BATCH,
    "chat": ["--chat", *LONG],
    "help": ["--help"],
    "compile": ["--prompt", "abcab", "--max-tokens", 3],
}
SPLIT: list[object] = ["--tensor-parallel-size", 2, "--max-model-len", 256, "--distributed-timeout", 8]


def requests(sandbox: Sandbox, count: int) -> None:
    params = {"max_tokens": 100, "ignore_eos": True}
    lines = ({"prompt": "ab" * (i % 3 + 1), "seed": i, "temperature": i % 2, **params} for i in range(count))
    (sandbox.folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def results(sandbox: Sandbox) -> list[tuple[int, str, list[int]]]:
    """Return the complete lines of the results, without statistics."""
    file = sandbox.folder / "out.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")]
    return sorted((line["index"], line["key"], line["token_ids"]) for line in lines)


def check(end: End, sandbox: Sandbox, statuses: set[int], killed: bool) -> None:
    assert end.status in statuses, end
    assert not NOISE.search(end.err), end
    assert killed or not end.orphans, end
    assert_gone(end.orphans)
    assert killed or not sandbox.leftovers(), end


@pytest.mark.parametrize("way", WAYS)
def test_process_exits_on_signal(way: str, folder: Path, tmp_path: Path) -> None:
    args = ["--model", folder, *SMALL, *WAYS[way]] if way != "help" else WAYS[way]

    def run(name: str, share: float = 2, numbers: list[signal.Signals] | None = None) -> tuple[Sandbox, End]:
        sandbox = Sandbox(tmp_path / name, way != "compile")
        requests(sandbox, 40)
        (sandbox.folder / "typed").write_text("ab\nabc\nabcd\n")
        with open(sandbox.folder / "typed") as typed:
            process = sandbox.start(args, stdin=typed)
            return sandbox, sandbox.send(process, share * whole, numbers or [])

    whole, begin = 0.0, time.monotonic()
    undisturbed, end = run("undisturbed")
    assert end.status == 0, end
    whole = time.monotonic() - begin
    for seed in range(RUNS):
        draw = random.Random(f"{way}-{seed}")
        numbers = draw.choice(SIGNALS)
        sandbox, end = run(str(seed), draw.random(), numbers)
        if end.err.startswith(STARTUP_ERROR):
            continue
        if way == "compile":
            kept = {name for name in sandbox.leftovers() if name.endswith(".so") and name.count("/") == 2}
            sandbox._before |= kept
        check(end, sandbox, {0, 128 + numbers[0]}, SIGKILL in numbers)
        if way == "batch":
            assert sandbox.send(sandbox.start(args), 0, []).status == 0
            assert results(sandbox) == results(undisturbed)


def rank(sandbox: Sandbox, leader: int) -> Callable[[], int]:
    """Return a function that finds the process of rank 1. It raises ProcessLookupError if there is none."""

    def find() -> int:
        for pid in sandbox.processes():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != leader and b"multiprocessing.spawn" in command:
                return pid
        raise ProcessLookupError

    return find


def test_all_ranks_exit_on_signal(tmp_path: Path) -> None:
    """If a rank is killed or stopped, all ranks exit in time with an error, and the batch can be resumed."""
    args = ["--model", random_model(tmp_path / "model"), *SMALL, *BATCH, *SPLIT]
    begin = time.monotonic()
    undisturbed = Sandbox(tmp_path / "undisturbed")
    requests(undisturbed, 12)
    assert undisturbed.send(undisturbed.start(args), 0, []).status == 0
    whole = time.monotonic() - begin
    for seed in range(-(-RUNS // 2)):
        draw = random.Random(f"ranks-{seed}")
        sandbox = Sandbox(tmp_path / str(seed))
        number = draw.choice([SIGINT, SIGTERM, SIGKILL, SIGSTOP, SIGKILL])
        requests(sandbox, 12)
        process = sandbox.start(args)
        other = number == SIGSTOP or draw.random() < 0.5
        find_pid = rank(sandbox, process.pid) if other else None
        end = sandbox.send(process, draw.uniform(0.2, 1) * whole, [number], find_pid)
        assert_gone(end.orphans)
        if other:
            assert end.status in (0, 1, 2), end
            assert end.status == 0 or "A rank could not start" in end.err or "A rank died, or" in end.err, end
        check(end._replace(orphans=[]), sandbox, {0, 1, 2, 128 + number}, number == SIGKILL and not other)
        assert sandbox.send(sandbox.start(args), 0, []).status == 0
        assert results(sandbox) == results(undisturbed)
