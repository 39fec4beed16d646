"""Time every kernel on this GPU against what the hardware allows, and against its peers; check it first.

    python bench/kernels.py [--only REGEX ...] [--besides] [--repeats 5] [--out bench/results]

The two ceilings are measured first: a device-to-device copy (bytes read plus written) and a large bf16
matrix product. A case of `bench/cases` is then compared with `naive` in float32 on the same inputs, its
outputs poisoned (`bench/check.py`), and captured in a CUDA graph, its calls rotating over enough sets of
inputs to overflow the L2 cache, and timed by replay: so launch gaps on the host do not count, and neither
does data left over from the call before. Kernel and peers take turns, and the medians are reported with
the spread of the repeats. `share` is the time that the least bytes and operations would take at the
ceilings, over the time taken. `--besides`: only cases that the file of results does not have yet.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # compiled kernels, whatever the caller tests
    os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench import check, events, rows  # noqa: E402
from bench.cases import Built, Case, all_cases  # noqa: E402
from bench.rows import TARGETS, Rows  # noqa: E402

MAX_SETS = 64  # of inputs
MEMORY = 0.5  # share of what is free that the inputs of a case may take
HEADLINES = re.compile(
    r"attention-qwen3-\S+-B(1|64)-q5-L(1024|16384)|ngram-B64-L4096|qwen3-8b-\w+-T(1|320)$|qwen3-0.6b-\w+-T1$"
)


def measure_case(out: Rows, case: Case, repeats: int) -> dict[str, list[float]]:
    """Milliseconds per call of the kernel and of each peer that runs, one value per repeat."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    free = torch.cuda.mem_get_info()[0]
    sets = max(1, min(MAX_SETS, 1 + 2 * cache // max(case.bytes, 1), int(MEMORY * free / max(case.bytes, 1))))
    built: list[Built] = [case.build(str(out.device)) for _ in range(sets)]
    graphs = {"kernel": events.capture([b.run for b in built])}
    for name in built[0].peers:
        try:
            graphs[name] = events.capture([b.peers[name] for b in built])
        except RuntimeError as error:  # a peer that this machine does not have
            out.add(f"{case.kernel} {case.label}: {name} failed: {str(error).splitlines()[0]}", missing=name)
    return events.interleaved({name: (graph.replay, n) for name, (graph, n) in graphs.items()}, repeats)


def figures(case: Case, times: dict[str, list[float]], machine: dict[str, float]) -> dict[str, Any]:
    median = statistics.median(times["kernel"])
    limit = max(case.bytes / machine["bandwidth"], case.flops / machine["flops"]) * 1e3
    peers = {name: statistics.median(values) * 1e3 for name, values in times.items() if name != "kernel"}
    return {
        "kernel": case.kernel,
        "case": case.label,
        "us": round(median * 1e3, 2),
        "spread": round(events.spread(times["kernel"]), 3),
        "limit_us": round(limit * 1e3, 2),
        "share": round(limit / median, 3),
        "peers_us": {name: round(us, 2) for name, us in peers.items()},
    }


def one(out: Rows, case: Case, machine: dict[str, float], repeats: int) -> None:
    """Check and time one case: one row."""
    name = f"{case.kernel}-{case.label}"
    checked: dict[str, Any] = {}
    try:
        checked = check.compare(case.build(str(out.device)).run, case.kernel)
    except torch.cuda.OutOfMemoryError:
        said = "  not checked: too large"
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        checked = {"check_failed": repr(error)[:500]}
        said = f"  not checked: {repr(error).splitlines()[0][:80]}"
    else:
        said = f"  error {checked['error']:.1e}"
        said += f", {checked['differing']:.1%} differ" if checked["differing"] else ""
        if check.is_wrong(checked, case.kernel):
            out.failed += 1
            said = f"  WRONG:{said}"
            checked["wrong"] = True
    rows.release_memory()
    row = figures(case, measure_case(out, case, repeats), machine)
    peers = "".join(f"  {peer} {us}" for peer, us in row["peers_us"].items())
    text = f"{name:46} {row['us']:9.2f} us, limit {row['limit_us']:8.2f} {row['share']:6.1%}{peers}{said}"
    if case.label.startswith("B64-L4096-n8"):
        text += f"  {TARGETS['ngram us'].judge(row['us'])}"
    headline = bool(HEADLINES.search(name)) or bool(checked.get("wrong"))
    out.add(text, headline=headline, **row, **checked)


def selected(patterns: list[str], have: set[tuple[str, str]]) -> Iterator[Case]:
    """The timed cases that match, in the order of the patterns, each name once."""
    cases = [case for case in all_cases() if case.timed]
    for pattern in patterns:
        for case in cases:
            name = (case.kernel, case.label)
            if name not in have and re.search(pattern, "-".join(name)):
                have.add(name)
                yield case


def measure(out: Rows, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    machine = events.ceilings(out.device)
    found = rows.read(out.path) if args.besides else []
    have = {(row["kernel"], row["case"]) for row in found if "us" in row}
    left_out = []
    for case in selected(args.only, have):
        name = f"{case.kernel}-{case.label}"
        if out.left() < 4.0:
            left_out.append(name)
            continue
        with out.attempt(name):
            one(out, case, machine, args.repeats)
        rows.release_memory()
    if left_out:
        what = f"{len(left_out)} cases from {left_out[0]} on"
        out.add(f"left out, no time: {what}", left_out=what, names=left_out)
    shares: dict[str, list[tuple[float, str]]] = {}
    for row in rows.read(out.path):
        if row.get("group") == out.group and row.get("limit_us"):
            shares.setdefault(row["kernel"], []).append((row["share"], row["case"]))
    for kernel, values in shares.items():
        median = statistics.median(share for share, _ in values)
        least, where = min(values)
        text = f"{kernel}: {len(values)} cases, median {median:.0%} of the limit"
        out.add(f"{text}, least {least:.0%} ({where})", headline=True, summary=kernel, median_share=median)


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", nargs="+", default=[""], help="regular expressions for KERNEL-CASE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--besides", action="store_true")
    rows.run("kernels", measure, parser, argv)


if __name__ == "__main__":
    main()
