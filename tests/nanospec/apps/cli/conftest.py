"""The command line in this process, with a tiny model that spells the alphabet."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanospec.apps.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command line and returns (exit status, stdout, stderr)."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        small = ["--model", str(folder), "--dtype", "float32", "--kv-cache-memory", str(1 << 20)]
        status = main([*small, *map(str, args)])
        return status, *capsys.readouterr()

    return run
