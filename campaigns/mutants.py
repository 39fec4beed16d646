"""Mutation testing: change the code at one place at a time, and check that a test fails.

    make mutants FILES="nanospec/kernels/speculation/verify.py nanospec/engine/blocks.py" SAMPLE=40 SEED=0

SEED selects SAMPLE mutants of each file (0: all). A mutant is killed if a test of its file fails, or if they
take 20 s more than twice their normal CPU time. A surviving mutant shows a missing test, or is
equivalent to the original; `campaigns/mutants.json` has the reasons for the known equivalent ones.

mutmut 3.8 skips functions with decorators, and therefore all kernels and properties. cosmic-ray 8.7 replaces
each arithmetic operator by eleven others, mostly type errors in kernels; it does not sample, edits the
checkout, and imports torch and Triton for each mutant.

Mutants are written to a copy of the checkout. Files are rewritten, rather than functions patched, because
Triton's interpreter reads the source of a kernel from its file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.mutations import Mutation, apply, mutations

ROOT = Path(__file__).parent.parent
REASONS = Path(__file__).parent / "mutants.json"
OTHERS = "long or model2 or ray or faults or statistics"
PHASES = (f"not (slow or {OTHERS})", f"slow and not ({OTHERS})")  # tests that run first and second
CEILING = 12 << 30  # limit of the address space in bytes, as a mutant may allocate without bound

# The tests of a source file, fastest first, in addition to its own: nanospec/llm.py has
# tests/nanospec/test_llm.py. Names without "/" are in the folder of its own test, others in tests/. The tests
# of a folder are those of its files that have no others.
MORE: dict[str, str] = json.loads((Path(__file__).parent / "tests_of.json").read_text())


class Result(NamedTuple):
    """The outcome of a mutant ("killed", "timeout", "survived", or "unknown" if the process failed but no
    test), the test that failed, and the CPU time in seconds."""

    outcome: str
    by: str
    seconds: float


class Failures:
    """A pytest plugin that records the first failure."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def tests_of(file: str) -> list[str]:
    """Return a source file's own tests and those in `MORE`, or else those of its folder."""
    path = Path(_key(file))
    mirror, more = _test(path.stem, path.parent), MORE.get(_key(file)) or ""
    found = [mirror] if (ROOT / mirror).exists() else []
    found += [_test(name, path.parent) for name in more.split()]
    found = found or [_test(name, path.parent) for name in MORE.get(f"{path.parent}/", "").split()]
    if not found:
        raise SystemExit(f"{file} has no tests; add it to campaigns/tests_of.json.")
    return found


def _key(file: str) -> str:
    """Return a file's name in the JSON files and in tests/, where kernels have a folder of their own."""
    return file.removeprefix("nanospec/") if file.startswith("nanospec/kernels/") else file


def _test(name: str, folder: Path) -> str:
    """Return the path of a test file, or of a test, that `MORE` names."""
    name, colons, function = name.partition("::")
    path = Path(name) if "/" in name else folder / name
    return os.path.normpath(Path("tests", path.parent, f"test_{path.name}.py")) + colons + function


def copy_checkout(to: Path) -> None:
    """Copy tracked and untracked (but not ignored) files. Link models."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    for model in (ROOT / "weights").iterdir():
        if not (to / "weights" / model.name).exists():
            (to / "weights" / model.name).symlink_to(model.resolve())


def prepare() -> None:
    """Import the modules that all runs need, except mutated ones, before forking."""
    import hypothesis
    import pytest  # noqa: F401
    import torch
    import triton.language  # noqa: F401
    from hypothesis import Phase

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # consecutive mutants may have equal times and sizes
    phases = [Phase.explicit, Phase.generate]  # without shrinking
    fixed: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None}
    hypothesis.settings.register_profile("mutants", phases=phases, **fixed)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "nanospec", "bench")]:
        del sys.modules[name]


def run(options: Sequence[str], folder: Path, limit: float) -> Result:
    """Run tests in a forked process with a limit of `limit` seconds of CPU time."""
    failed = folder / ".failed"
    failed.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        _be_pytest(options, folder, failed, limit)
    code, usage, over = _wait(child, limit * 5 + 30)
    by = failed.read_text() if failed.exists() else ""
    seconds = usage.ru_utime + usage.ru_stime
    number = os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0
    if over or number == signal.SIGXCPU:
        return Result("timeout", by, seconds)
    if code in (0, 5 << 8):  # 5: there are no such tests
        return Result("survived", "", seconds)
    crashed = number not in (0, signal.SIGKILL) or code == 4 << 8  # SIGKILL: out of memory; 4: cannot import
    return Result("killed" if by or crashed else "unknown", by, seconds)


def _be_pytest(given: Sequence[str], folder: Path, failed: Path, limit: float) -> None:
    """Run pytest in the child process. Never returns."""
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 3))
        if not any("threads" in name for name in given):  # ThreadSanitizer reserves terabytes
            resource.setrlimit(resource.RLIMIT_AS, (CEILING, CEILING))
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        log = os.open(folder / ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder)]
        options += ["--hypothesis-profile", "mutants", "-k", "not smollm2"]
        code = pytest.main([*options, *given], plugins=[Failures(failed)])
    finally:
        os._exit(int(code))


def _wait(child: int, limit: float) -> tuple[int, Any, bool]:
    """Wait for a child and return (status, resource usage, whether it was killed after `limit` seconds)."""
    end, over = time.monotonic() + limit, False
    while True:
        pid, code, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return code, usage, over
        if time.monotonic() > end:
            over = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)


def sampled(file: str, sample: int, seed: int) -> list[Mutation]:
    """Return the sampled mutants of a file, in source order."""
    chosen = mutations(ROOT / file)
    if 0 < sample < len(chosen):
        chosen = sorted(random.Random(f"{seed} {file}").sample(chosen, sample))
    return chosen


@cache
def usual_seconds(tests: tuple[str, ...], phase: str, folder: Path) -> float:
    """Return the CPU time of tests without a mutant."""
    before = run(["-m", phase, *tests], folder, 1200)
    if before.outcome != "survived":
        log = (folder / ".log").read_text()[-2000:]
        raise SystemExit(f"{' '.join(tests)} fail without a mutant: {before.by}\n{log}")
    return before.seconds


def try_all(
    file: str, folder: Path, chosen: Sequence[Mutation], tests: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Run the chosen mutants of a file. Yield their descriptions, outcomes and reasons of equivalence."""
    source, place = (ROOT / file).read_text(), folder / file
    reasons = json.loads(REASONS.read_text()).get(_key(file), {})
    for mutation in chosen:
        for phase in PHASES:
            limit = 2 * usual_seconds(tests, phase, folder) + 20
            place.write_text(apply(source, mutation))
            try:
                result = run(["-m", phase, *tests], folder, limit)
            finally:
                place.write_text(source)
            if result.outcome != "survived":
                break
        line = {"file": file, **mutation.described(source), **result._asdict()}
        if result.outcome == "survived":
            line["equivalent"] = reasons.get(f"{line['text']} | {line['before']} -> {line['after']}", "")
        words = "{file}:{line} {kind}: {before} -> {after}: {outcome} {by} {seconds:.0f} s"
        print(words.format(**line), flush=True)
        yield line


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return a summary line per file and in total."""
    texts = []
    for file in [*dict.fromkeys(line["file"] for line in lines), "all"]:
        selected = [line for line in lines if file in (line["file"], "all")]
        counts = Counter("equivalent" if line.get("equivalent") else line["outcome"] for line in selected)
        killed, count = counts["killed"] + counts["timeout"], len(selected) - counts["equivalent"]
        rest = f"({counts['timeout']} by timeout), {counts['equivalent']} equivalent"
        texts.append(f"{file}: {killed} of {count} killed {rest}")
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser("python -m campaigns.mutants", description="Run mutation tests.")
    parser.add_argument("files", nargs="+", help="source files to mutate")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants per file (0: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    for file in args.files:
        if not file.endswith((".py", ".h", ".cpp")) or not (ROOT / file).is_file():
            parser.error(f"{file} is not a Python or C++ file of this repository.")
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    os.environ.pop("PYTHONPATH", None)
    prepare()
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        if not all(file.endswith(".py") for file in args.files):
            os.environ["XDG_CACHE_HOME"] = f"{name}/.cache"  # of compiled C++ mutants
        copy_checkout(Path(name))
        for file in args.files:
            chosen = sampled(file, args.sample, args.seed)
            for line in try_all(file, Path(name), chosen, tuple(tests_of(file))):
                lines.append(line)
                if args.out:
                    args.out.write_text(json.dumps({"seed": args.seed, "mutants": lines}, indent=1) + "\n")
    print(summary(lines))


if __name__ == "__main__":
    main()
