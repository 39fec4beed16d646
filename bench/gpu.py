"""Run all tests and benchmarks that require a GPU, in parts of at most nine minutes. Needs no network.

    python bench/gpu.py [tests|kernels|steps|e2e|all] [--out DIR] [--cpu]

A part is a list of groups, most important first; groups of tests run at the same time. Each group is a
process, which is restarted after an item that crashed it, so that a crash loses only one item. Processes
append rows to DIR/PART.jsonl and print to DIR/PART-GROUP.log, so that an interrupted run keeps its results
(`bench/rows.py`). A run ends with a summary of at most 9,000 characters and a line of JSON. The exit status
is 1 if a test failed, a result was wrong, or a group did not complete. `--cpu` is a dry run with tiny shapes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NEEDS = ("torch", "triton", "numpy", "safetensors", "tokenizers")  # the part `tests` also needs pytest


def check_for(modules: Sequence[str]) -> None:
    """Exit with an error message if a module is not installed."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise SystemExit(f"bench/gpu.py requires {', '.join(missing)}: not installed for {sys.executable}.")


check_for(NEEDS)

import torch  # noqa: E402

from bench import common, rows  # noqa: E402

PART_SECONDS = 530.0
GRACE = 6.0  # seconds between a group's deadline and the time it is killed
LEAST = 20.0  # minimum seconds left to start a group
RESTARTS = 8
SUMMARY = 9000  # characters
STOP = threading.Event()  # set when the run is interrupted


@dataclass(frozen=True)
class Group:
    """A process: its arguments for Python, its time limit in seconds, whether it writes rows, and whether it
    runs alone. Benchmarks do; tests do not, since they mostly compile on one core."""

    name: str
    command: tuple[str, ...]
    limit: float = 120
    writes_rows: bool = True
    alone: bool = True


@dataclass
class Outcome:
    """How a group ended: "ok", "failed" (exit status), "crashed", "stopped" (time limit) or "left out"."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


# ---- groups --------------------------------------------------------------------------------------


def groups(part: str, cpu: bool) -> list[Group]:
    """Return the groups of a part. The first one compiles the kernels on all cores,
    since compiling each one at its first launch takes minutes."""

    def group(name: str, limit: float, script: str, *options: str) -> Group:
        return Group(name, (f"bench/{script}.py", *options), limit)

    if part == "tests":  # none in a dry run: they require a GPU
        tests = [] if cpu else sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
        plugin = ("-q", "--tb=short", "-p", "bench.gpu_tests", "-p", "no:cacheprovider", "-o", "timeout=0")
        names = [
            (path, name) for path in tests for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
        ]
        found = [Group(n, ("-m", "pytest", f"{path}::{n}", *plugin), 480, alone=False) for path, n in names]
    elif cpu:
        few = ("--shape", "tiny", "--batches", "1", "2", "--repeats", "1")
        return {
            "kernels": [group("all", 60, "kernels", "--only", "rms_norm-H576", "ngram-B1-L1024")],
            "steps": [group("tiny", 120, "steps", *few, "--contexts", "64", "--ks", "0", "2")],
            "e2e": [group("tiny", 120, "e2e", *few, "--max-tokens", "8", "--prompt", "48", "--seconds", "1")],
        }[part]
    elif part == "kernels":
        first = ("^attention-qwen3-.*-q[15]-", r"qwen3-.*-T\d", "^ngram-", "^(layout|verify|rope|rms)", "")
        found = [group("all", 480, "kernels", "--only", *first)]
    elif part == "steps":
        shapes = (("qwen3-0.6b", 120), ("qwen3-8b", 150), ("llama-3.2-1b", 90))
        found = [group(shape, limit, "steps", "--shape", shape) for shape, limit in shapes]
        long = ("--contexts", "8192", "32768", "--ks", "0", "4")
        found += [group(f"{shape} long", 90, "steps", "--shape", shape, *long) for shape, _ in shapes[:2]]
    else:
        found = [group(shape, 240, "e2e", "--shape", shape) for shape in ("qwen3-0.6b", "qwen3-8b")]
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    target = f"sm_{major}{minor}"
    if target not in ("sm_80", "sm_90", "sm_100"):
        return found
    command = ("bench/compile.py", "--targets", target, "--jobs", str(os.cpu_count() or 1))
    return [Group("compile", command, 120, writes_rows=False), *found]


# ---- processes -----------------------------------------------------------------------------------


def run_group(group: Group, part: str, out: Path, until: float, cpu: bool = False) -> Outcome:
    """Run a group until it is done. Restart it after an item that crashed its process."""
    start, file, log = time.time(), out / f"{part}.jsonl", out / f"{part}-{group.name}.log"

    def own_rows() -> list[dict[str, Any]]:
        return [row for row in rows.read(file) if row.get("group") == group.name]

    outcome = Outcome(group.name, "ok")
    if until - start < min(LEAST, group.limit):
        outcome.status, outcome.why = "left out", "out of time"
    end = min(start + group.limit, until)
    command = [sys.executable, *group.command]
    if group.writes_rows:
        command += ["--out", str(out), "--group", group.name, "--until", f"{end - GRACE:.1f}"]
        command += ["--cpu"] * (cpu and part != "tests")
    for _ in range(RESTARTS * (outcome.status == "ok")):
        before = len(own_rows())
        with log.open("ab") as sink:
            sink.write(f"\n==== {group.name}: {' '.join(command[1:])}\n".encode())
            sink.flush()
            begin = sink.tell()
            status, why = _wait(command, sink, end)
        new = own_rows()[before:]
        outcome.rows += new
        begun = [row["begins"] for row in new if "begins" in row]
        if status != "ok":
            outcome.status = status if outcome.status == "ok" else outcome.status
            lost = "" if any(row.get("done") for row in new) else f"{begun[-1]}: " if begun else ""
            outcome.why = f"{outcome.why} {lost}{why} {_tail(log, begin)}".strip()
        if status in ("ok", "stopped") or not begun or any(row.get("done") for row in new):
            break
    outcome.seconds = time.time() - start
    row = {"group": group.name, "text": f"{group.name}: {outcome.status} {outcome.why}".strip()}
    rows.write(file, {**row, "status": outcome.status, "seconds": round(outcome.seconds, 1)})
    return outcome


def _wait(command: list[str], sink: Any, end: float) -> tuple[str, str]:
    """Run a command until `end`. Return its status and, if known, the reason."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # poisoned memory needs deterministic algorithms
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
        preexec_fn=os.setpgrp,  # a new process group, to kill all of it; the session stays the same
    )  # fmt: skip
    try:
        while (code := process.poll()) is None:
            if STOP.wait(0.1) or time.time() > end:
                return "stopped", "time limit"
    finally:  # also for remaining child processes
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(3)
            except (ProcessLookupError, PermissionError):
                break
            except subprocess.TimeoutExpired:
                continue
    return (
        ("crashed", f"signal {signal.Signals(-code).name}") if code < 0 else ("failed" if code else "ok", "")
    )


def _tail(log: Path, begin: int) -> str:
    """Return the last meaningful line of a group's output; for a traceback, the error."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    kept = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("{", "="))]
    return kept[-1][:300] if kept else ""


def run_part(
    part: str, listed: list[Group], limit: float, out: Path, outcomes: list[Outcome], cpu: bool = False
) -> None:
    """Run the groups of a part within `limit` seconds, and append to `outcomes`."""
    for old in (out / f"{part}.jsonl", *out.glob(f"{part}-*.log")):
        old.unlink(missing_ok=True)
    until = time.time() + limit
    rows.write(out / f"{part}.jsonl", {"text": part, "environment": common.environment()})
    for alone, wave in groupby(listed, lambda group: group.alone):
        with ThreadPoolExecutor(1 if alone else len(listed)) as pool:
            try:
                for outcome in pool.map(lambda group: run_group(group, part, out, until, cpu), wave):
                    outcomes.append(outcome)
                    for row in outcome.rows:
                        print(f"  {row['text']}"[:220]) if "text" in row else None
                    line = (
                        f"{part} / {outcome.name}: {outcome.status} in {outcome.seconds:.0f} s {outcome.why}"
                    )
                    print(line[:300], flush=True)
            except BaseException:
                STOP.set()  # ends the processes that other threads wait for
                raise


def summary(found: dict[str, list[Outcome]], size: int = SUMMARY) -> str:
    """Return for each part its failures and then its headlines, truncated to `size` characters in all."""
    kept = []
    for part, outcomes in found.items():
        well = sum(outcome.status == "ok" for outcome in outcomes)
        lines = [f"== {part}: {well} of {len(outcomes)} groups ok, {sum(o.seconds for o in outcomes):.0f} s"]
        lines += [f"  {o.name}: {o.status.upper()} {o.why}"[:260] for o in outcomes if o.status != "ok"]
        shown = [
            row for outcome in outcomes for row in outcome.rows if row.get("headline") or "left_out" in row
        ]
        shown.sort(key=lambda row: not (row.get("wrong") or "error" in row))  # failures first
        lines += [f"  {row['text']}"[:200] for row in shown]
        while sum(map(len, lines)) + len(lines) > size // len(found) - 60:
            lines.pop()
        total = len(shown) + 1 + len(outcomes) - well
        kept += lines + [f"  ... {total - len(lines)} more lines in the files"] * (len(lines) < total)
    return "\n".join(kept)


PARTS = ("tests", "kernels", "steps", "e2e")


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--cpu", action="store_true", help="dry run with tiny shapes, without a GPU")
    args = parser.parse_args(argv)
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py requires a GPU; use --cpu for a dry run.")
    parts, out = PARTS if args.part == "all" else [args.part], args.out.resolve()
    if "tests" in parts:
        check_for(["pytest"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SystemExit(
            f"Cannot write to {out}: {error.strerror}; choose another folder with --out."
        ) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # also stops the running group
    found: dict[str, list[Outcome]] = {}
    try:
        for part in parts:
            run_part(part, groups(part, args.cpu), PART_SECONDS, out, found.setdefault(part, []), args.cpu)
    finally:
        ends = {part: {o.name: o.status for o in outcomes} for part, outcomes in found.items()}
        bad = sum(status != "ok" for part in ends.values() for status in part.values())
        print(summary(found))
        print(json.dumps({"commit": common.commit(), "out": str(out), "parts": ends, "bad": bad}), flush=True)
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
