"""Run one file of tests on a GPU to its end, whatever its tests do to the process.

    python bench/gpu_tests.py tests/gpu/test_engine.py [--each 90] [--out bench/results]

pytest runs in a process of its own and notes each test as it begins and as it ends. Where a test takes the
process with it, takes too long, or leaves the GPU unusable (an illegal access is an error for everything
after it), the test is recorded and a fresh process goes on with those that are left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from bench import rows  # noqa: E402

RESTARTS = 8
START = 60.0  # seconds until the first test begins, at most
GOES_ON = 60  # exit status of a process that ended itself since the GPU was unusable


# ---- inside pytest -------------------------------------------------------------------------------


class Notes:
    """A plugin that writes a line to a file for each test that begins or ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, **line: Any) -> None:
        rows.write(self.path, line)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.note(collected=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(begins=nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        outcome: Any = yield
        report = outcome.get_result()
        if report.when == "call" or report.outcome != "passed":
            why = _first_line(report) if report.outcome != "passed" else ""
            seconds = round(report.duration, 2)
            self.note(ends=item.nodeid, outcome=report.outcome, seconds=seconds, when=report.when, why=why)
            if report.outcome == "failed" and not _gpu_answers():
                os._exit(GOES_ON)


def _first_line(report: Any) -> str:
    """Of what went wrong, or why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return (str(crash.message) if crash else str(report.longrepr)).strip().splitlines()[0][:300]


def _gpu_answers() -> bool:
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


# ---- outside ---------------------------------------------------------------------------------------


def follow(process: subprocess.Popen[bytes], notes: Path, each: float, until: float) -> str:
    """Wait for pytest; end it when a test takes over `each` seconds or the time is over. Why it ended."""
    since, seen = time.time(), 0
    while process.poll() is None:
        time.sleep(0.05)
        lines = len(rows.read(notes))
        if lines != seen:
            since, seen = time.time(), lines
        if time.time() > until or time.time() - since > (each if seen > 1 else max(each, START)):
            process.kill()
            process.wait()
            return "no time" if time.time() > until else f"over {each:.0f} s"
    code = process.returncode
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return "the GPU was unusable after it" if code == GOES_ON else ""


def measure(out: rows.Rows, args: argparse.Namespace) -> None:
    done: dict[str, dict[str, Any]] = {}
    collected: list[str] = []
    for _ in range(RESTARTS):
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes"
            command = [sys.executable, __file__, args.file, "--inside", str(notes)]
            skip = Path(folder) / "done"
            skip.write_text("\n".join(done))
            process = subprocess.Popen([*command, "--skip", str(skip)], cwd=ROOT)
            why = follow(process, notes, args.each, out.until)
            said = rows.read(notes)
        collected = collected or [name for line in said for name in line.get("collected", ())]
        begun = [line["begins"] for line in said if "begins" in line]
        for line in (line for line in said if "ends" in line):
            if line["ends"] not in done or line["outcome"] != "passed":
                done[line["ends"]] = line
        lost = begun[-1] if begun and begun[-1] not in done else None
        if lost is not None and why != "no time":
            why = why or "the process ended"
            done[lost] = {"ends": lost, "outcome": "failed", "why": why, "seconds": None}
        if not why or why == "no time" or not begun or set(collected) <= set(done):
            break
    report(out, args.file, collected, done, process.returncode)


def report(
    out: rows.Rows, file: str, collected: list[str], done: dict[str, dict[str, Any]], code: int
) -> None:
    """A row for each test that did not pass, and one for the file."""
    count = {"passed": 0, "failed": 0, "skipped": 0}
    for name, line in done.items():
        count[line["outcome"]] += 1
        out.path.parent.mkdir(parents=True, exist_ok=True)
        if line["outcome"] == "failed":
            out.add(f"FAILED {name}: {line['why']}", headline=True, test=name, **_figures(line))
        else:
            text = f"{line['outcome']} {name}"
            rows.write(out.path, {"group": out.group, "text": text, "test": name, **_figures(line)})
    left = [name for name in collected if name not in done]
    if left:
        out.add(f"left out, no time: {len(left)} tests", left_out=f"{len(left)} tests of {file}", names=left)
    if not collected:
        out.failed += 1
        out.add(f"FAILED {file}: no test could be collected (exit status {code})", error="collection")
    out.failed += count["failed"]
    slowest = sorted(done.values(), key=lambda line: -(line["seconds"] or 0))[:3]
    slow = ", ".join(f"{line['ends'].split('::')[-1]} {line['seconds']} s" for line in slowest)
    said = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
    out.add(f"{file}: {said}, {len(left)} left out; slowest: {slow}"[:300], headline=True, **count)


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": line["outcome"], "why": line["why"], "seconds": line["seconds"]}


def inside(file: str, notes: Path, skip: Path) -> int:
    """Run pytest in this process."""
    done = set(skip.read_text().splitlines())
    plugin = Notes(notes)

    class Rest:
        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(self, config: Any, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if item.nodeid not in done]

    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
    return int(pytest.main([file, *options], plugins=[Rest(), plugin]))


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("file", help="of tests")
    parser.add_argument("--each", type=float, default=90.0, help="seconds that one test may take")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=Path, help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args(argv)
    if known.inside:
        raise SystemExit(inside(known.file, known.inside, known.skip))
    rows.run("tests", measure, parser, argv)


if __name__ == "__main__":
    main()
