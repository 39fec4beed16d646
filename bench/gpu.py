"""Run all tests and benchmarks that require a GPU, in parts of at most nine minutes. Needs no network.

    python bench/gpu.py [smoke|tests|kernels|steps|e2e|sweep|compare|all] [--before DIR] [--out DIR] [--cpu]

`smoke` selects from all parts what any GPU of compute capability 8.0 with 8 GB of memory can run in five
minutes. Shapes, contexts and batches that do not fit in the free memory are skipped, with a row that says so.
`compare` runs the smoke tests, times kernels and steps of the checkout `--before` and of this one in turn,
and writes a row with the ratio for each.

A part is a list of groups, most important first; groups of tests run at the same time. Each group is a
process, which is restarted after an item that crashed it, so that a crash loses only one item. Processes
append rows to DIR/PART.jsonl and print to DIR/PART-GROUP.log, so that an interrupted run keeps its results
(`bench/rows.py`). A run ends with a summary and a line of JSON. The exit status is 1 if a test failed, a
result was wrong, or a group did not complete. `--cpu` is a dry run with tiny shapes.
"""

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
NEEDS = ("torch", "triton", "numpy", "safetensors", "tokenizers")  # tests also need pytest and hypothesis


def check_for(modules: Sequence[str]) -> None:
    """Exit with an error message if a module is not installed."""
    if missing := [name for name in modules if find_spec(name) is None]:
        remedy = f"not installed for {sys.executable}; `make test` installs them in .venv"
        raise SystemExit(f"bench/gpu.py requires {', '.join(missing)}: {remedy}.")


check_for(NEEDS)

from bench import common, rows  # noqa: E402
from bench.card import Card, find_card  # noqa: E402

PART_SECONDS, SMOKE_SECONDS = 530.0, 280.0
GRACE = 6.0  # seconds between a group's deadline and the time it is killed
LEAST = 20.0  # minimum seconds left to start a group
RESTARTS = 8
STOP = threading.Event()  # set when the run is interrupted


@dataclass(frozen=True)
class Group:
    """A process: its arguments for Python, its time limit in seconds, whether it writes rows, whether it runs
    alone (benchmarks do; tests do not, since they mostly compile on one core), and the reason to skip it."""

    name: str
    command: tuple[str, ...]
    limit: float = 120
    writes_rows: bool = True
    alone: bool = True
    skip: str = ""


@dataclass
class Outcome:
    """How a group ended: "ok", "failed" (exit status), "crashed", "stopped" (time limit), "left out" (of
    time) or "skipped" (does not fit in memory)."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


TESTS = ROOT / "tests" / "gpu"
FIRST = "--only ^attention-qwen3-.*-q[15]- qwen3-.*-T\\d ^ngram- ^(layout|verify|rope|rms) ."
LONG = "--contexts 8192 32768 --ks 0 4"
SMOKE_TESTS = [
    "test_engine.py::test_speculation_is_bitwise_identical[captured-async]",
    "test_waiting.py::test_async_loop_never_waits[ngram]",
    "test_kernels.py::test_layer_under_graph_capture",
    "test_kernels.py::test_linear_matches_float64[(1024, 3072)-linear_add]",
    "test_kernels.py::test_linear_matches_float64[(1024, 3072)-norm_swiglu]",
    "test_kernels.py::test_attention_matches_float64[gqa-torch.bfloat16]",
    "test_kernels.py::test_attention_matches_float64[prompts-torch.bfloat16]",
    "test_kernels.py::test_attention_is_bitwise_independent_of_the_batch[(16, 8, 128)-None]",
]
SMOKE_CASES = """--only
    ^attention-qwen3-0.6b-B(1|16)-q[15]-L4096$ qwen3-0.6b-(qkv|o|gate_up|down|head)-T(1|20)$
    ^(rms_norm|embed)-H1024- ^rope_cache-qwen3-0.6b- ^kv_move-qwen3-0.6b-B1$ ^ngram-B8-L4096-n8$
    ^sample-qwen-B8-K4-(greedy|top_p)$ ^typical-qwen-B8-K4-temperature$ ^(verify-B8|layout-B64)-K4"""
COMPARED = """--repeats 3 --only
    ^attention-qwen3-(0.6b|8b)-B(1|64)-q[15]-L(1024|16384)(-L512)?$
    ^(norm_linear|norm_swiglu|linear_add)-qwen3-.*-T(1|5|64|320)$
    ^sample-qwen-B1-K[04]-(top_p|top_k-top_p) ^quantized-qwen3-8b-.*-T1$"""
SMOKE_E2E = "--batches 1 8 --repeats 1 --prompt 512 --max-tokens 64 --seconds 5"
SMOKE_COMPILED = ("qwen3-0.6b", "H1024-", "ngram-B", "layout", "verify", "sample-qwen", "typical-qwen")


def groups(part: str, card: Card | None, before: Path = ROOT) -> list[Group]:
    """Return the groups of a part on a card, or in a dry run. The first one compiles the kernels on all
    cores, since compiling each one at its first launch takes minutes."""

    def group(
        name: str, limit: float, script: str, options: str = "", shape: str = "", root: Path = ROOT
    ) -> Group:
        given = [*(["--shape", shape] if shape else []), *options.split()]
        skip = card.why_skipped(shape) if card and shape else ""
        return Group(name, (f"{root}/bench/{script}.py", *given), limit, skip=skip)

    def compared(kernels: str, steps: str, *shapes: str) -> list[Group]:
        """Return groups that run in both checkouts in turn."""
        runs = [("kernels", kernels, ""), *(("steps", steps, shape) for shape in shapes)]
        checkouts = ("before", before), ("after", ROOT)
        return [
            group(f"{shape or script} {when}", 60, script, options, shape, root)
            for script, options, shape in runs
            for when, root in checkouts
        ]

    if card is None:  # no tests, since they require a GPU
        tiny = "--shape tiny --batches 1 2 --repeats 1"
        dry = {
            "kernels": group("kernels", 60, "kernels", "--only rms_norm-H576 ngram-B1-L1024"),
            "steps": group("steps", 120, "steps", f"{tiny} --contexts 64 --ks 0 2"),
            "e2e": group("e2e", 120, "e2e", f"{tiny} --max-tokens 8 --prompt 48 --seconds 1"),
            "sweep": group("sweep", 300, "sweep", "--shape tiny --tokens 96 --repeats 1"),
        }
        if part == "compare":
            return compared("--only rms_norm-H576", "--batches 1 --contexts 64 --ks 0 2 --repeats 1", "tiny")
        return [own for name, own in dry.items() if part in (name, "smoke")]
    largest, small, large = card.largest(), "qwen3-0.6b", "qwen3-8b"
    texts = {path.name: path.read_text() for path in sorted(TESTS.glob("test_*.py"))}
    tests = [
        f"{file}::{n}" for file, text in texts.items() for n in re.findall("^def (test_.*?)\\(", text, re.M)
    ]
    found = {
        "smoke": [
            *test_groups(SMOKE_TESTS, 120),
            group("kernels", 60, "kernels", SMOKE_CASES),
            group("steps", 70, "steps", "--batches 1 8 --ks 0 4 --repeats 3", largest),
            group("e2e", 70, "e2e", SMOKE_E2E, largest),
        ],
        "tests": test_groups(tests, 480),
        "kernels": [group("all", 480, "kernels", FIRST)],
        "steps": [
            group(small, 120, "steps", shape=small),
            group(large, 150, "steps", shape=large),
            group("llama-3.2-1b", 90, "steps", shape="llama-3.2-1b"),
            *(group(f"{shape} long", 90, "steps", LONG, shape) for shape in (small, large)),
        ],
        "e2e": [group(shape, 240, "e2e", shape=shape) for shape in (small, large)],
        "sweep": [group(shape, 240, "sweep", shape=shape) for shape in (large, small)],
        "compare": [
            *test_groups(SMOKE_TESTS, 100),
            *compared(COMPARED, "--ks 0 4 8 --repeats 5", small, large),
        ],
    }[part]
    only, limit = ((largest, *SMOKE_COMPILED), 90) if part == "smoke" else (("",), 180)
    compile_in = {"compile": ROOT} | ({"compile before": before} if part == "compare" else {})
    options = ("--targets", "local", "--jobs", str(os.cpu_count() or 1), "--only", *only)
    compiled = [
        Group(name, (f"{root}/bench/compile.py", *options), limit, writes_rows=False)
        for name, root in compile_in.items()
    ]
    return [*compiled, *found]


def test_groups(tests: Sequence[str], limit: float) -> list[Group]:
    """Return a group for each function of `tests`, which are names in `tests/gpu`."""
    plugin = ("-q", "--tb=short", "-p", "bench.gpu_tests", "-p", "no:cacheprovider", "-o", "timeout=0")
    found: dict[str, list[str]] = {}
    for test in tests:
        found.setdefault(re.sub(r".*::|\[.*", "", test), []).append(f"{TESTS}/{test}")
    return [Group(n, ("-m", "pytest", *own, *plugin), limit, alone=False) for n, own in found.items()]


def run_group(group: Group, part: str, out: Path, until: float, cpu: bool = False) -> Outcome:
    """Run a group until it is done. Restart it after an item that crashed its process."""
    start, file, log = time.time(), out / f"{part}.jsonl", out / f"{part}-{group.name}.log"

    def own_rows() -> list[dict[str, Any]]:
        return [row for row in rows.read(file) if row.get("group") == group.name]

    outcome = Outcome(group.name, "ok")
    if group.skip:
        outcome.status, outcome.why = "skipped", group.skip
    elif until - start < min(LEAST, group.limit):
        outcome.status, outcome.why = "left out", "out of time"
    end = min(start + group.limit, until)
    command = [sys.executable, *group.command]
    if group.writes_rows:
        command += ["--out", str(out), "--part", part, "--group", group.name, "--until", f"{end - GRACE:.1f}"]
        command += ["--cpu"] * cpu
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


def write_ratios(file: Path) -> None:
    """Write and print the ratio of the times after and before, for each kernel and captured step."""
    times: dict[str, dict[str, float]] = {}
    for row in rows.read(file):
        when = row.get("group", "").rpartition(" ")[2]
        if "us" in row:
            times.setdefault(f"{row['kernel']}-{row['case']}", {})[when] = row["us"]["kernel"]
        elif row.get("mode") == "graph":
            what = f"step-{row['shape']}-B{row['batch']}-K{row['k']}"
            times.setdefault(what, {})[when] = 1e3 * row["ms"]
    for what, us in times.items():
        if len(us) == 2:
            ratio = us["after"] / us["before"]
            text = f"{what}: {us['before']:.2f} us before, {us['after']:.2f} after, ratio {ratio:.3f}"
            rows.write(file, {"group": "ratios", "text": text, "case": what, "ratio": round(ratio, 4)})
            print(text)


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
    if code < 0:
        return "crashed", f"signal {signal.Signals(-code).name}"
    return "failed" if code else "ok", ""


def _tail(log: Path, begin: int) -> str:
    """Return the last meaningful line of a group's output; for a traceback, the error."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    kept = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("{", "="))]
    return kept[-1][:300] if kept else ""


def run_part(
    part: str, listed: list[Group], limit: float, out: Path, outcomes: list[Outcome], card: Card | None = None
) -> None:
    """Run the groups of a part within `limit` seconds, in a dry run without a card. Append to `outcomes`."""
    for old in (out / f"{part}.jsonl", *out.glob(f"{part}-*.log")):
        old.unlink(missing_ok=True)
    until = time.time() + limit
    rows.write(out / f"{part}.jsonl", {"text": part, "environment": common.environment(), "card": card})
    for alone, wave in groupby(listed, lambda group: group.alone):
        with ThreadPoolExecutor(1 if alone or card is None else card.num_test_processes()) as pool:
            try:
                for outcome in pool.map(lambda group: run_group(group, part, out, until, card is None), wave):
                    outcomes.append(outcome)
                    for row in outcome.rows:
                        print(f"  {row['text']}"[:220]) if "text" in row else None
                    status = f"{outcome.status} in {outcome.seconds:.0f} s {outcome.why}"
                    print(f"{part} / {outcome.name}: {status}"[:300], flush=True)
            except BaseException:
                STOP.set()  # ends the processes that other threads wait for
                raise


def summary(found: dict[str, list[Outcome]]) -> str:
    """Return for each part its failures and then its headlines, wrong results first."""
    lines = []
    for part, outcomes in found.items():
        well = sum(outcome.status == "ok" for outcome in outcomes)
        lines += [f"== {part}: {well} of {len(outcomes)} groups ok, {sum(o.seconds for o in outcomes):.0f} s"]
        lines += [f"  {o.name}: {o.status.upper()} {o.why}"[:260] for o in outcomes if o.status != "ok"]
        every = [row for outcome in outcomes for row in outcome.rows]
        shown = [row for row in every if row.get("headline") or "left_out" in row]
        shown.sort(key=lambda row: not (row.get("wrong") or "error" in row))
        lines += [f"  {row['text']}"[:200] for row in shown]
    return "\n".join(lines)


PARTS = ("tests", "kernels", "steps", "e2e")


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "part", nargs="?", default="all", choices=["smoke", *PARTS, "sweep", "compare", "all"]
    )
    parser.add_argument("--before", type=Path, help="the other checkout of `compare`")
    parser.add_argument("--cpu", action="store_true", help="dry run with tiny shapes, without a GPU")
    args = parser.parse_args(argv)
    try:
        card = None if args.cpu else find_card()
    except ValueError as error:
        raise SystemExit(f"bench/gpu.py requires a GPU, or --cpu for a dry run. {error}") from None
    if args.part == "compare" and args.before is None:
        parser.error("compare needs --before, another checkout; with make: BEFORE=FOLDER.")
    before = (args.before or ROOT).resolve()
    parts, out = PARTS if args.part == "all" else [args.part], args.out.resolve()
    if {"smoke", "tests", "compare"} & {*parts} and not args.cpu:
        check_for(["pytest", "hypothesis"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SystemExit(f"Cannot write to {out} ({error.strerror}); use another --out.") from None
    if card is not None:
        print("\n".join(card.lines()), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # also stops the running group
    found: dict[str, list[Outcome]] = {}
    try:
        for part in parts:
            limit = SMOKE_SECONDS if part == "smoke" else PART_SECONDS
            run_part(part, groups(part, card, before), limit, out, found.setdefault(part, []), card)
            if part == "compare":
                write_ratios(out / "compare.jsonl")
    finally:
        ends = {part: {o.name: o.status for o in outcomes} for part, outcomes in found.items()}
        bad = sum(status not in ("ok", "skipped") for part in ends.values() for status in part.values())
        print(summary(found))
        print(json.dumps({"commit": common.commit(), "out": str(out), "parts": ends, "bad": bad}), flush=True)
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
