"""What a benchmark on a GPU measures, written row by row: a run that is killed keeps what it had.

Each part of `make gpu` has one file, PART.jsonl, to which the processes that measure append. A row says
which group of cases it belongs to, holds figures, and a `text` for people; a `headline` is shown again in
the summary at the end of the run. Benchmarks stop by themselves when their time is over (`--until`), and
say in a row what they left out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark on a GPU lets one set."""
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder for the rows")
    parser.add_argument("--group", default="", help="what the rows are said to belong to")
    parser.add_argument("--until", type=float, default=math.inf, help="when to stop, as time.time() has it")
    parser.add_argument("--cpu", action="store_true", help="a dry run, with a stand-in for torch.cuda")


class Rows:
    """The rows of one process.

    Attributes:
        device: where to measure: the GPU, or the CPU in a dry run.
        until: when to stop, as `time.time()` has it.
        failed: rows that report an error.
    """

    def __init__(self, part: str, args: argparse.Namespace) -> None:
        self.path: Path = args.out / f"{part}.jsonl"
        self.group, self.until = args.group or part, args.until
        self.cpu, self.failed = args.cpu, 0
        if args.cpu:
            from bench import stand_in

            stand_in.install()
        elif not torch.cuda.is_available():
            raise SystemExit("This needs a GPU; --cpu makes a dry run without one.")
        self.device = torch.device("cpu" if args.cpu else "cuda")
        self.dtype = torch.float32 if args.cpu else torch.bfloat16

    def add(self, text: str, headline: bool = False, **figures: Any) -> None:
        """Write a row and print its text."""
        print(text, flush=True)
        write(self.path, {"group": self.group, "text": text, "headline": headline, **figures})

    def left(self) -> float:
        """Seconds that may still be used."""
        return self.until - time.time()

    def has_time(self, what: str, seconds: float = 3.0) -> bool:
        """Whether there is time for something that takes so long; if not, a row says that it is left out."""
        if self.left() >= seconds:
            return True
        self.add(f"left out, no time: {what}", left_out=what)
        return False

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An error inside becomes a row; a GPU that is unusable after it ends the process. What does not
        fit in memory is left out."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.add(f"left out, no memory: {what}", left_out=f"{what} (memory)")
            release_memory()
        except Exception as error:
            self.failed += 1
            first = (str(error).strip() or repr(error)).splitlines()[0]
            text = f"FAILED {what}: {type(error).__name__}: {first[:300]}"
            self.add(text, error=repr(error)[:2000], what=what)
            del error
            try:
                release_memory()
                torch.cuda.synchronize()
            except Exception:
                raise SystemExit(f"the GPU does not answer any more, after {what}") from None


def write(path: Path, row: dict[str, Any]) -> None:
    """Append one row, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All rows; a line that was cut off is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def release_memory() -> None:
    """Give memory that nobody holds any more back to the GPU."""
    import gc

    gc.collect()
    torch.cuda.empty_cache()


class Target(NamedTuple):
    """What we hope for: values up to `excellent`, up to `good`, up to `weak` (fair), and above (weak). Set
    before anything was measured, from the limits of an H200 (`bench/roofline.py`) and what other engines
    reach."""

    excellent: float
    good: float
    weak: float

    def judge(self, value: float) -> str:
        if value <= self.excellent:
            return "excellent"
        return "good" if value <= self.good else "fair" if value <= self.weak else "weak"

    def __str__(self) -> str:
        return f"excellent {self.excellent:g}, good {self.good:g}, weak above {self.weak:g}"


TARGETS = {
    "qwen3-0.6b": Target(0.65, 0.9, 1.5),  # ms of one step, B=1, K=0
    "qwen3-8b": Target(4.0, 4.5, 5.0),
    "llama-3.2-1b": Target(0.80, 0.85, 1.2),
    "qwen3-8b B=64 K=4": Target(12, 14, 20),
    "t(4)/t(0)": Target(1.03, 1.06, 1.15),  # at B=1
    "besides the model": Target(0.015, 0.03, 0.10),  # share of a step: propose, verify, commit
    "host gap": Target(0.02, 0.05, 0.10),  # share of a step
    "ngram us": Target(8, 20, 100),  # B=64, 4k history
}


def run(part: str, measure: Callable[[Rows, argparse.Namespace], None], parser: argparse.ArgumentParser,
        argv: list[str] | None = None) -> None:  # fmt: skip
    """The main function of a benchmark. The last line it prints is JSON."""
    add_arguments(parser)
    args = parser.parse_args(argv)
    rows = Rows(part, args)
    before = len(read(rows.path))
    measure(rows, args)
    print(json.dumps({"rows": len(read(rows.path)) - before, "failed": rows.failed, "file": str(rows.path)}))
    if rows.failed:
        raise SystemExit(1)
