"""A pytest plugin for `bench/gpu.py`: a row for each test as it begins and ends.

Tests that an earlier process of the group began are left out, so that a file goes on behind a test that ended
the process. A test that takes longer than `EACH` seconds or leaves the GPU unusable ends it, too.
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import rows

EACH = 90.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--out", type=Path)
    parser.addoption("--group")
    parser.addoption("--until")  # the driver ends the process


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        Notes(config.getoption("--out") / "tests.jsonl", config.getoption("--group"))
    )


class Notes:
    """Writes rows, and knows which tests of this group began before."""

    def __init__(self, path: Path, group: str) -> None:
        self.path, self.group, self.count = path, group, Counter[str]()
        self.begun = {row.get("begins") for row in rows.read(path) if row.get("group") == group}

    def write(self, **row: Any) -> None:
        rows.write(self.path, {"group": self.group, **row})

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.begun]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        faulthandler.dump_traceback_later(EACH, exit=True)
        self.write(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.count[report.outcome] += 1
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr).strip().splitlines()[0][:300]
            self.write(text=f"FAILED {report.nodeid}: {why}", headline=True, error=why, **row)
            try:
                torch.cuda.synchronize() if torch.cuda.is_available() else None
            except RuntimeError:
                os._exit(1)
        else:
            self.write(**row)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.count["passed"] and not self.begun:
            session.exitstatus = 1  # a file of which all tests were skipped has checked nothing
        said = ", ".join(f"{number} {outcome}" for outcome, number in self.count.items())
        self.write(text=f"{self.group}: {said or 'no test'}", headline=True, done=True)
