"""`bench/compile.py` as a command, and what it says of errors; see also `tests/kernels/test_compile.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# A function that calls another one, which does not compile, launched as a case's kernel would be.
BROKEN = """
import json, sys
sys.path.insert(0, {root!r})
from bench import compile

import triton
import triton.language as tl

@triton.jit
def inner(x):
    return x + no_such_name

@triton.jit
def outer(x, BLOCK: tl.constexpr):
    # A source of many lines,
    # of which an excerpt
    # says nothing.
    tl.store(x, inner(tl.load(x)))

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

try:
    source = ASTSource(outer, {{"x": "*fp32", "BLOCK": "constexpr"}}, {{(1,): 16}})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
except Exception as error:
    print(json.dumps(compile.cause(error)))
"""


def test_the_innermost_cause_is_named_on_one_line(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"  # a file: triton reads the source of a kernel
    script.write_text(BROKEN.format(root=str(ROOT)))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout)
    assert "no_such_name" in said
    assert "\n" not in said
    assert "excerpt" not in said


def test_a_name_that_no_case_has_is_refused() -> None:
    command = [sys.executable, str(ROOT / "bench" / "compile.py"), "--only", "attention", "nosuchkernel"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "no case matches nosuchkernel" in run.stderr
    assert not run.stdout
