"""A pytest plugin: a progress bar on a terminal, and a last line about the skipped tests."""

from collections import Counter
from typing import Any

import pytest
from tqdm import tqdm


class Progress:
    """Replaces pytest's dots by a bar. Failures are printed when they happen."""

    def __init__(self, file: Any) -> None:
        self.bar = tqdm(file=file, unit=" tests", dynamic_ncols=True, smoothing=0.05)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.bar.reset(len(ids))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.bar.reset(len(session.items) or None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if report.when == "teardown":
            self.bar.update()
        if report.failed:
            self.bar.write(f"FAILED {report.nodeid}", self.bar.fp)
        category = report.outcome if report.when == "call" or not report.passed else ""
        return ("error" if report.failed and report.when != "call" else category), "", ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.bar.close()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and reporter.isatty and config.get_verbosity() <= 0:
        config.pluginmanager.register(Progress(config.get_terminal_writer()._file), "progress")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    result = yield
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        reports = reporter.stats.get("skipped", ())
        skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
        reasons = [f"{n} ({why})" for why, n in skipped.most_common() if not why.startswith("covered: ")]
        if reasons:
            reporter.write_line("Not tested: " + ", ".join(reasons))
    return result
