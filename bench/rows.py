"""Results of GPU benchmarks, appended row by row, so that an interrupted run keeps its results.

Each part of `make gpu` has a file PART.jsonl to which its processes append rows. A row has a group, values
and a `text` to display; the summary of a run shows the rows with `headline`. A benchmark stops at `--until`
and writes a row for each item that it skipped.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import stand_in


class Rows:
    """The rows of one process.

    Attributes:
        device: the GPU, or the CPU in a dry run.
        until: the deadline, as `time.time()`.
        begun: the items that earlier processes of this group started.
        failed: the number of rows that report an error.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path = args.out / f"{args.part}.jsonl"
        self.group, self.until, self.cpu, self.failed = args.group or args.part, args.until, args.cpu, 0
        if args.cpu:
            stand_in.install()
        elif not torch.cuda.is_available():
            raise SystemExit("This benchmark requires a GPU; use --cpu for a dry run.")
        self.device = torch.device("cpu" if args.cpu else "cuda")
        self.dtype = torch.float32 if args.cpu else torch.bfloat16
        self.begun = {row.get("begins") for row in read(self.path) if row.get("group") == self.group}

    def add(self, text: str, headline: bool = False, **figures: Any) -> None:
        """Write a row and print its text."""
        print(text, flush=True)
        write(self.path, {"group": self.group, "text": text, "headline": headline, **figures})

    def begins(self, what: str, seconds: float = 3.0) -> bool:
        """Return whether to start an item, and write a row if so. Items are skipped if fewer than `seconds`
        are left, or if an earlier process of this group has started them (and crashed)."""
        if what in self.begun:
            return False
        if self.until - time.time() < seconds:
            self.add(f"skipped, out of time: {what}", left_out=what)
            return False
        write(self.path, {"group": self.group, "begins": what})
        return True

    def fits(self, what: str, size: float) -> bool:
        """Return whether `size` bytes of GPU memory are free, and write a row if not."""
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if size > free:
            text = f"skipped: {what} needs {size / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
            self.add(text, left_out=f"{what} (memory)")
        return size <= free

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Write a row for an error in the context. Exit if the GPU is unusable afterwards."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.add(f"skipped, out of memory: {what}", left_out=f"{what} (memory)")
        except Exception as error:
            self.failed += 1
            first = (str(error).strip() or repr(error)).splitlines()[0]
            text = f"FAILED {what}: {type(error).__name__}: {first[:300]}"
            self.add(text, headline=True, error=repr(error)[:2000])
        try:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        except RuntimeError:
            raise SystemExit(f"the GPU is unusable after {what}") from None


def write(path: Path, row: dict[str, Any]) -> None:
    """Append a row in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all complete rows. An interrupted run may leave an incomplete last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(
    part: str,
    measure: Callable[[Rows, argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    argv: list[str] | None = None,
) -> None:
    """Run a benchmark from its command line. Exits with status 1 if a row reports an error."""
    parser.add_argument("--part", default=part, help="name of the file of rows")
    parser.add_argument("--group", default="", help="group of the rows")
    parser.add_argument("--until", type=float, default=math.inf, help="deadline, as time.time()")
    parser.add_argument("--cpu", action="store_true", help="dry run with a fake torch.cuda")
    args = parser.parse_args(argv)
    rows = Rows(args)
    measure(rows, args)
    write(rows.path, {"group": rows.group, "done": True})
    if rows.failed:
        raise SystemExit(1)
