"""Check every kernel on this GPU against `naive`, and time it against the hardware limit.

    python bench/kernels.py [--only REGEX ...] [--repeats 5] [--out bench/results]

Each case of `bench/cases` is compared with `naive` in float32 on the same inputs, with poisoned outputs
(`bench/check.py`). It is then captured in a CUDA graph whose calls rotate over enough input sets to overflow
the L2 cache, and timed by replay. The kernel and its peers (cuBLAS, torch's attention) alternate; medians are
reported. `share` is the lower bound of the time (minimum bytes and FLOPs at the measured bandwidth and FLOP
rate) divided by the measured time.
"""

import argparse
import os
import re
import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # compiled kernels
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import check, common, events, rows
from bench.cases import Case, all_cases
from bench.rows import Rows
from nanospec.kernels.launch import Backend

MAX_SETS, MEMORY = 64, 0.5  # limits of input sets: their number, and their fraction of the free memory
HEADLINES = re.compile(
    r"attention-qwen3-\S+-B(1|64)-q5-L(1024|16384)|ngram-B64-L4096|qwen3-8b-\w+-T(1|320)$|qwen3-0.6b-\w+-T1$"
)


def checked(out: Rows, case: Case) -> dict[str, Any]:
    """Compare a case with `naive`. Cases that do not fit in memory are not checked."""
    try:
        how: Backend = "naive" if out.cpu else "triton"
        found: dict[str, Any] = check.compare(case.build, str(out.device), case.kernel, how)
    except torch.cuda.OutOfMemoryError:
        return {"checked": False}
    found["wrong"] = check.is_wrong(found, case.kernel)
    return found


def times(out: Rows, case: Case, repeats: int) -> dict[str, float]:
    """Return the microseconds per call of the kernel and of each peer."""
    cache, free = torch.cuda.get_device_properties(0).L2_cache_size, torch.cuda.mem_get_info()[0]
    before, built = torch.cuda.memory_allocated(), [case.build(str(out.device))]
    size = max(torch.cuda.memory_allocated() - before, 1)  # of an input set, with those of the peers
    sets = min(MAX_SETS, 1 + 2 * cache // max(case.bytes, 1), int(MEMORY * free / size))
    built += [case.build(str(out.device)) for _ in range(sets - 1)]
    graphs = {"kernel": events.capture([b.run for b in built])}
    graphs |= {name: events.capture([b.peers[name] for b in built]) for name in built[0].peers}
    found = events.interleaved(graphs, repeats)
    return {name: 1e3 * statistics.median(values) for name, values in found.items()}


def one(out: Rows, case: Case, machine: dict[str, float], repeats: int) -> float:
    """Check and time one case. Write its row and return its `share`."""
    name, found = f"{case.kernel}-{case.label}", checked(out, case)
    wrong = found.get("wrong", False)
    out.failed += wrong
    us = times(out, case, repeats)
    limit = max(case.bytes / machine["bandwidth"], case.flops / machine["flops"]) * 1e6
    share = limit / us["kernel"]
    details = "".join(f"  {which} {value}" for which, value in us.items() if which != "kernel")
    details += (
        f"  error {found['error']:.1e}, {found['differing']:.1%} differ"
        if "error" in found
        else "  not checked"
    )
    text = f"{'WRONG ' * wrong}{name:46} {us['kernel']:9.2f} us, limit {limit:8.2f} {share:6.1%}{details}"
    out.add(text, headline=wrong or bool(HEADLINES.search(name)), kernel=case.kernel, case=case.label, us=us,
            limit_us=round(limit, 2), share=round(share, 3), **found)  # fmt: skip
    return share


def measure(out: Rows, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    machine, shares = events.limits(out.device), dict[str, list[tuple[float, str]]]()
    cases = {f"{case.kernel}-{case.label}": case for case in all_cases()}
    names = dict.fromkeys(name for part in args.only for name in cases if re.search(part, name))
    for name in (name for name in names if name not in out.begun):  # in the order of the patterns
        if not out.begins(name, 4.0):
            break
        with out.attempt(name):
            share = one(out, cases[name], machine, args.repeats)
            shares.setdefault(cases[name].kernel, []).append((share, name))
    for kernel, found in shares.items():
        if cases[found[0][1]].bytes:
            median, (least, at) = statistics.median(share for share, _ in found), min(found)
            text = f"{kernel}: {len(found)} cases, median {median:.0%} of the limit, min {least:.0%} ({at})"
            out.add(text, headline=True, summary=kernel, median_share=median)
    out.add(f"{sum(map(len, shares.values()))} of {len(names)} kernels checked and timed", headline=True)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--only", nargs="+", default=[""], help="regular expressions that match KERNEL-CASE")
    rows.run("kernels", measure, parser, argv)


if __name__ == "__main__":
    main()
