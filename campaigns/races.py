"""Find data races between programs and out-of-bounds accesses in the Triton kernels. Needs no GPU.

    make races ARGS="-k verify"

ttsem executes the IR of every launch in tests/kernels/{layer,sampling,speculation} on the CPU, and records
the addresses that each program reads and writes. Two programs race if one of them writes an address that the
other accesses, unless a counter orders them (see `unordered_race`). The run also fails if a test fails, if
planted defects are not found, if a launch is too large to be checked, or, without ARGS, if no test launches
several programs of one of the kernels.

Not detected: races between the threads of a program, such as a missing `tl.debug_barrier`; accesses to other
tensors of the launch, or to another part of a tensor's storage; programs that write the same value; a stale
cache; and missing waits of programmatic dependent launch, which is disabled. Options of AMD are not checked.
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["NANOSPEC_PDL"] = os.environ["TRITON_INTERPRET"] = "0"  # before the kernels are imported

import hypothesis
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from ttsem import pidraces, sanitize

ROOT = Path(__file__).parent.parent
OPTIONS = ["--noconftest", "--disable-warnings", "--quiet", "--override-ini=addopts=--import-mode=importlib"]
# These two files import the whole package.
OPTIONS += ["-pno:cacheprovider", "--ignore-glob=*/test_noise.py"]
OTHERS = re.compile(r"naive\]|\[naive-|native\]|\[native-|gfx942")  # tests of other implementations
OPTIONS += [f"{ROOT}/tests/kernels/{name}" for name in ("layer", "sampling", "speculation")]
ACQUIRE_RELEASE = "sem = 4"  # in the IR of an atomic operation
find_race = pidraces.find_race


def unordered_race(log: list[Any] | None) -> Any:
    """Return a race in a launch, or None. `log` has its accesses: (program, kind, operation, addresses, ...).

    A counter is incremented with acquire and release semantics. What a program accesses before its increment
    happens before what a later program accesses after its own increment of the same counter."""
    entries = list(enumerate(log or ()))
    ends: dict[Any, tuple[int, int]] = {}  # by program: index and address of its first increment
    for n, (program, kind, operation, addresses, *_) in entries:
        if kind == "a" and ACQUIRE_RELEASE in operation:
            ends.setdefault(program, (n, int(addresses[0])))
    race = find_race([entry for n, entry in entries if n <= ends.get(entry[0], (n,))[0]])
    for last, (end, counter) in ends.items():
        after = [entry for n, entry in entries if entry[0] == last and n > end]
        if after and race is None:
            seen = {program: n for program, (n, address) in ends.items() if address == counter and n < end}
            others = [entry for n, entry in entries if entry[0] != last and n > seen.get(entry[0], -1)]
            race = find_race(after + [("another", *entry[1:]) for entry in others])
    return race


@triton.jit
def _planted(out, counter, SIZE: tl.constexpr, STEP: tl.constexpr, SEM: tl.constexpr):  # type: ignore
    """Store two blocks of 4 elements. The last program to finish replaces the first element by the sum."""
    i, j, b = tl.arange(0, 4), tl.arange(0, 8), tl.program_id(0)
    tl.store(out + b * STEP + i, b + 1.0, b * STEP + i < SIZE)
    if tl.atomic_add(counter, 1, sem=SEM) == 1:
        tl.store(out, tl.sum(tl.load(out + j, j < SIZE, 0)))


# Constants of `_planted`, and the fault that ttsem reports with an `out` of 7 elements: none; a wrong mask;
# blocks that overlap; a counter that orders nothing.
PLANTED = {
    (7, 4, "acq_rel"): "", (8, 4, "acq_rel"): "oob_write",
    (7, 3, "acq_rel"): "race", (7, 4, "relaxed"): "race",
}  # fmt: skip


def found(*constants: Any) -> str:
    """Return the kind of fault that is found in `_planted`, "" if none."""
    try:
        _planted[(2,)](torch.zeros(7), torch.zeros(1, dtype=torch.int32), *constants)
    except sanitize.KernelFault as error:
        return str(error.fault.kind)
    return ""


class Plugin:
    """Selects tests, and stands in for the fixtures of tests/kernels/conftest.py."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not OTHERS.search(item.name)]

    poison = pytest.fixture(lambda self: torch.use_deterministic_algorithms(True), name="poison")
    ordered_dot = pytest.fixture(lambda self: None, name="ordered_dot")


def kernels() -> set[str]:
    """Return the names of the kernels that the functions of nanospec/kernels/ launch."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "nanospec/kernels").rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    jitted = {n.name for n in nodes if isinstance(n, ast.FunctionDef) and "@triton.jit" in ast.unparse(n)}
    launches = [n.func.value for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
    return jitted & {getattr(n, "id", getattr(n, "attr", "")) for each in launches for n in ast.walk(each)}


def main(arguments: list[str]) -> int:
    """Return the exit status of a run, with further arguments of pytest."""
    hypothesis.settings.register_profile("races", deadline=None)
    hypothesis.settings.load_profile("races")
    launches: Counter[str] = Counter()
    with (
        sanitize.session(cuda_is_cpu=False) as session,
        mock.patch.object(pidraces, "find_race", unordered_race),
    ):
        run = JITFunction.run

        def counted(function: Any, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> None:
            launches[function.__name__] += math.prod(grid) > 1
            run(function, *args, grid=grid, **kwargs)

        with mock.patch.object(JITFunction, "run", counted):
            planted = {constants: found(*constants) for constants in PLANTED}
            failed = pytest.main([*OPTIONS, *arguments], [Plugin()])
    print(
        "Launches of several programs:", ", ".join(f"{name} {launches[name]}" for name in sorted(kernels()))
    )
    if planted != PLANTED:
        sys.exit(f"Found {planted} instead of {PLANTED}.")
    if not arguments and (missing := [name for name in sorted(kernels()) if not launches[name]]):
        sys.exit(f"No test launches several programs of {', '.join(missing)}.")
    if session.races_unchecked:
        sys.exit(f"{session.races_unchecked} launches are too large to be checked; use smaller inputs.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
