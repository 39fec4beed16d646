"""All that only a GPU can tell, in parts that fit a machine lent for half an hour, ten minutes a call.

    python bench/gpu.py [smoke|tests|steps|kernels|e2e|peers|all] [--out DIR] [--cpu]
    python bench/gpu.py pack [--wheels FILE ...]

A part ends by itself within nine minutes; `all` is the six of them in turn. It is a list of groups
(`bench/gpu_groups.py`), the most important first, and each group is a process of its own: what an illegal
access or a crash takes with it is one group. Rows are written to DIR/PART.jsonl as they are measured
(`bench/rows.py`) and what the processes print to DIR/PART.log, so that a run that is killed keeps what it
had. At the end comes a summary of at most 9,000 characters, and as the last line the same as JSON.

`--cpu` is a dry run of the same processes on tiny shapes, with a stand-in for `torch.cuda`. `pack` collects
what should travel to a machine without a network in `carry/`: a tokenizer, texts to replay, and wheels of
peers (`pip download --no-deps fa3-fwd`), which are unpacked for the groups to import.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NEEDS = ("torch", "triton", "numpy", "safetensors", "tokenizers")  # and the part `tests`: pytest


def check_for(modules: Sequence[str]) -> None:
    """End with a sentence if this Python lacks some of these modules."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise SystemExit(f"bench/gpu.py needs {', '.join(missing)}, which {sys.executable} does not have.")


check_for(NEEDS)

import torch  # noqa: E402

from bench import common, rows  # noqa: E402
from bench.gpu_groups import LIMITS, PARTS, Group  # noqa: E402

GRACE = 6.0  # seconds between a group's own deadline and its end by force
LEAST = 20.0  # seconds without which a group is not started
SUMMARY = 9000  # characters; a caller may see only the last 12,000 of what is printed
CARRY_LIMIT, TREE_LIMIT = 45 << 20, 64 << 20


@dataclass
class Outcome:
    """How a group ended.

    Attributes:
        status: "ok", "failed" (it said so by its exit status), "crashed", "stopped" (by force, over time)
            or "left out".
        why: what it said last, if it did not end well.
    """

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


def run_group(group: Group, part: str, out: Path, until: float, cpu: bool = False) -> Outcome:
    """Run a group in a process of its own, for as long as it may take and the part's time lasts."""
    start = time.time()
    if until - start < min(LEAST, group.limit):
        return Outcome(group.name, "left out", why="no time")
    end = min(start + group.limit, until)
    file = out / f"{part}.jsonl"
    before = len(rows.read(file))
    command = [sys.executable, *group.command]
    if group.measures:
        command += ["--out", str(out), "--group", group.name, "--until", f"{end - GRACE:.1f}"]
        command += ["--cpu"] * cpu
    log = out / f"{part}.log"
    with log.open("ab") as sink:
        sink.write(f"\n==== {group.name}: {' '.join(command[1:])}\n".encode())
        sink.flush()
        begin = sink.tell()
        status, why = _wait(command, {**os.environ, **group.env}, sink, end)
    if status != "ok":
        why = f"{why} {_tail(log, begin)}".strip()
    outcome = Outcome(group.name, status, time.time() - start, why, rows.read(file)[before:])
    if status != "ok" or not group.measures:
        text = f"{group.name}: {status} {why}".strip()
        rows.write(file, {"group": group.name, "text": text, "status": status})
    return outcome


def _wait(command: list[str], env: dict[str, str], sink: Any, end: float) -> tuple[str, str]:
    """Run a command until `end`; how it ended, and why if that is known."""
    env = {**env, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *unpacked()])}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,  # a group of its own to end, in the same session, which ends with ours
        )  # fmt: skip
    except OSError as error:
        return "failed", str(error)
    try:
        code = process.wait(max(end - time.time(), 0.1))
    except subprocess.TimeoutExpired:
        return "stopped", "over its time"
    finally:  # also after Ctrl-C, and for what the command left behind
        _end(process)
    if code < 0:
        return "crashed", f"signal {signal.Signals(-code).name}"
    return ("failed" if code else "ok"), ""


@cache
def unpacked(carry: Path = common.CARRY) -> list[str]:
    """The folder with the modules of the wheels that travelled, if any."""
    wheels = sorted((carry / "wheels").glob("*.whl"))
    if not wheels:
        return []
    folder = tempfile.mkdtemp(prefix="wheels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return [folder]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(3)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path, begin: int) -> str:
    """The last line of a group's output that says something: of a traceback, the error."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(("{", "="))]
    return said[-1][:300] if said else ""


def run_part(
    part: str, groups: list[Group], limit: float, out: Path, outcomes: list[Outcome], cpu: bool = False
) -> None:
    """Run the groups of a part in turn, whatever becomes of each, within `limit` seconds; append to
    `outcomes` how each ended."""
    for old in (out / f"{part}.jsonl", out / f"{part}.log"):
        old.unlink(missing_ok=True)
    until = time.time() + limit
    begins = {"group": "", "text": part, "commit": common.commit(), "started": time.time()}
    rows.write(out / f"{part}.jsonl", begins)
    for group in groups:
        outcome = run_group(group, part, out, until, cpu)
        outcomes.append(outcome)
        for row in outcome.rows:
            print(f"  {row.get('text', '')}"[:220])
        print(f"{part} / {group.name}: {outcome.status} in {outcome.seconds:.0f} s {outcome.why}", flush=True)


# ---- what is said at the end ---------------------------------------------------------------------


def summary(found: dict[str, list[Outcome]], size: int = SUMMARY) -> str:
    """Of each part what did not end well, then its headlines; cut evenly where that is too long."""
    texts = {part: _lines(part, outcomes) for part, outcomes in found.items()}
    share = size // max(len(texts), 1)
    kept = []
    for lines in texts.values():
        total = 0
        for i, line in enumerate(lines):
            total += len(line) + 1
            if total > share - 60:
                kept.append(f"  ... {len(lines) - i} more lines in the files")
                break
            kept.append(line)
    return "\n".join(kept)


def _lines(part: str, outcomes: list[Outcome]) -> list[str]:
    well = sum(outcome.status == "ok" for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines = [f"== {part}: {well} of {len(outcomes)} groups well, {seconds:.0f} s"]
    for outcome in outcomes:
        if outcome.status != "ok":
            lines.append(f"  {outcome.name}: {outcome.status.upper()} {outcome.why}"[:260])
        lines += [f"    {row['text']}"[:260] for row in outcome.rows if isinstance(row.get("error"), str)][:6]
    headlines = [row for outcome in outcomes for row in outcome.rows if row.get("headline")]
    headlines.sort(key=lambda row: not row.get("wrong"))  # wrong results first, else as they were measured
    lines += [f"  {row['text']}"[:200] for row in headlines]
    left_out = [str(row["left_out"]) for outcome in outcomes for row in outcome.rows if row.get("left_out")]
    if left_out:
        lines.append(f"  left out: {', '.join(left_out)}"[:400])
    return lines


def as_json(found: dict[str, list[Outcome]], out: Path) -> str:
    """The last line: how every group ended."""
    parts = {part: {o.name: o.status for o in outcomes} for part, outcomes in found.items()}
    wrong = sum(o.status not in ("ok", "left out") for outcomes in found.values() for o in outcomes)
    return json.dumps({"commit": common.commit(), "out": str(out), "parts": parts, "wrong": wrong})


# ---- what travels --------------------------------------------------------------------------------


def pack(model: Path, data: Path, wheels: Sequence[Path] = (), carry: Path = common.CARRY) -> dict[str, Any]:
    """Copy a model's tokenizer, the evaluation texts and `wheels` to `carry`; say how much travels in all."""
    found = [path for path in sorted(data.iterdir()) if path.suffix in (".jsonl", ".txt")]
    texts = {path.name: path.read_bytes() for path in found}
    if not texts:
        raise SystemExit(f"{data} holds no texts (*.jsonl, *.txt); name a folder with --data.")
    shutil.rmtree(carry, ignore_errors=True)
    (carry / "tokenizer").mkdir(parents=True)
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(path, carry / "tokenizer")
    (carry / "data").mkdir()
    for name, text in texts.items():
        (carry / "data" / name).write_bytes(text)
    (carry / "wheels").mkdir()
    for path in wheels:
        shutil.copy(path, carry / "wheels")
    (carry / "commit").write_text(common.commit() + "\n")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    tree = sum((ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file())
    own = sum(path.stat().st_size for path in carry.rglob("*") if path.is_file())
    if own > CARRY_LIMIT or own + tree > TREE_LIMIT:
        raise SystemExit(
            f"carry/ has {own:,} bytes, the checkout {tree:,}: too much for {TREE_LIMIT:,} in all."
        )
    return {"carry_bytes": own, "checkout_bytes": tree, "files": sorted(p.name for p in carry.rglob("*.*"))}


def make_folder(out: Path) -> None:
    """Where the rows go; end with a sentence if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SystemExit(f"bench/gpu.py cannot write to {out}: {error.strerror}; see --out.") from None


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all", "pack"])
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--cpu", action="store_true", help="a dry run on tiny shapes, without a GPU")
    model = ROOT / "weights" / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=model, help="folder whose tokenizer to pack")
    parser.add_argument("--wheels", type=Path, nargs="+", default=[], help="of peers, to pack")
    parser.add_argument("--data", type=Path, default=common.DATA, help="folder of texts to pack")
    args = parser.parse_args(argv)
    if args.part == "pack":
        print(json.dumps(pack(args.model, args.data, args.wheels)))
        return
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a GPU; --cpu makes a dry run without one.")
    parts = list(PARTS) if args.part == "all" else [args.part]
    if "tests" in parts:
        check_for(["pytest"])
    out = args.out.resolve()
    make_folder(out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the running group ends with us
    found: dict[str, list[Outcome]] = {}
    try:
        for part in parts:
            found[part] = []
            run_part(part, PARTS[part](args.cpu), LIMITS[part], out, found[part], args.cpu)
    finally:
        print(summary(found))
        print(as_json(found, out), flush=True)
    if json.loads(as_json(found, out))["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
