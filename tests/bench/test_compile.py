"""`bench/compile.py` as a command; see also `tests/kernels/test_compile.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_unknown_case_is_rejected() -> None:
    command = [sys.executable, str(ROOT / "bench" / "compile.py"), "--only", "attention", "nosuchkernel"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "no case matches nosuchkernel" in run.stderr
    assert not run.stdout
