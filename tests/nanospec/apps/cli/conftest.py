"""The command line in this process, with a tiny model that spells the alphabet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanospec.apps.cli.main import main

Run = Callable[..., tuple[int, str, str]]
Fail = Callable[..., str]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command line and returns (exit status, stdout, stderr)."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        small = ["--model", str(folder), "--dtype", "float32", "--kv-cache-memory", str(1 << 20)]
        status = main([*small, *map(str, args)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Fail:
    """Return a function that runs a command line, checks that it ends with status 2 and one line on stderr,
    and returns the line."""

    def fail(*args: str | Path) -> str:
        try:
            status: Any = main([*map(str, args)])
        except SystemExit as error:
            status = error.code
        errors = capsys.readouterr().err
        assert (status, errors.count("\n")) == (2, 1), errors
        return errors

    return fail
