"""A pytest plugin for `bench/gpu.py` that writes a row when a test starts and when it ends.

Tests that an earlier process of the group has started are skipped, so that a restarted file continues after a
crash. A test that takes more than `EACH` seconds, or leaves the GPU unusable, also ends the process.
"""

import faulthandler
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import rows

EACH = 180.0


def pytest_addoption(parser: pytest.Parser) -> None:
    for option in ("--out", "--part", "--group", "--until"):  # --until: the driver stops the process
        parser.addoption(option)


def pytest_configure(config: pytest.Config) -> None:
    path = Path(config.getoption("--out"), f"{config.getoption('--part')}.jsonl")
    config.pluginmanager.register(Notes(path, config.getoption("--group")))


class Notes:
    """Writes the rows of a group and skips tests that have a row already."""

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
            session.exitstatus = 1  # fail if all tests of a file were skipped
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.count.items())
        self.write(text=f"{self.group}: {counts or 'no tests'}", headline=True, done=True)
