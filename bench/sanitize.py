"""Run a few captured steps of a tiny model under NVIDIA's compute-sanitizer, where it is installed.

    python bench/sanitize.py memcheck|racecheck [--out bench/results]

memcheck finds accesses out of bounds, racecheck races in shared memory (not between programs). What runs
is `bench/smoke.py once`, with every kernel of a step in it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu_groups import sanitizer  # noqa: E402
from bench.rows import Rows, read, run  # noqa: E402


def measure(rows: Rows, args: argparse.Namespace) -> None:
    program = args.program or sanitizer()
    if program is None:
        places = "PATH, /usr/local/cuda*, /opt/nvidia, wheels"
        rows.add(
            f"{args.tool}: compute-sanitizer is not installed ({places})",
            headline=True,
            missing="compute-sanitizer",
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--tool", args.tool, "--error-exitcode", "99", "--print-limit", "5"]
        command += ["--target-processes", "application-only"]
        command += [sys.executable, "bench/smoke.py", "once", "--out", folder, *["--cpu"] * rows.cpu]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, errors="replace",
                timeout=max(min(rows.left() - 2, 1e6), 1), env={**os.environ, "NANOSPEC_PDL": args.pdl},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            rows.add(f"{args.tool}: did not end in time", headline=True, left_out=args.tool)
            return
        ran = bool(read(Path(folder) / "smoke.jsonl"))
    output = done.stdout + done.stderr
    print(output[-6000:])
    said = re.findall(r"^=+\s*((?:ERROR|RACECHECK) SUMMARY.*|Error: .*)$", output, re.MULTILINE)
    kinds = "Invalid|Misaligned|Error: Race|Warning: Race|Program hit"
    found = re.findall(rf"^=+\s*((?:{kinds}).*)$", output, re.MULTILINE)
    wrong = done.returncode != 0 or not ran
    rows.failed += wrong
    summary = "; ".join([f"exit status {done.returncode}", *said[-1:], *found[:1]])
    rows.add(f"{args.tool}: {summary}"[:300], headline=True, tool=args.tool, ran=ran, found=found[:20])


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("tool", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--program", help="compute-sanitizer; by default it is looked for")
    parser.add_argument("--pdl", default="1", choices=["0", "1"], help="NANOSPEC_PDL: dependent launch")
    run("tests", measure, parser, argv)


if __name__ == "__main__":
    main()
