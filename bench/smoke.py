"""The first minutes on a GPU: does the engine run, is on = off, does nothing wait, how long is a step?

    python bench/smoke.py environment|equality|waiting|speed|once|memory [--shape qwen3-0.6b]
                          [--out bench/results]

environment: what there is, and the two ceilings. equality: a tiny model's outputs with and without guesses,
captured and not. waiting: engine steps while torch refuses whatever waits for the device. speed: one step
at B=1 with K=0 and K=4 of a real model's shape, with programmatic dependent launch and without. once: a few
captured steps, for compute-sanitizer. memory: an engine as it starts by default, and what it takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common, events, roofline, tiny
from bench.rows import TARGETS, Rows, run
from bench.steps import load_shape, make_engine, step_ms
from nanospec import SamplingParams
from nanospec.config import EngineConfig
from nanospec.device.graphs import Bucket
from nanospec.device.worker import Worker
from nanospec.drafters.ngram import NgramDrafter
from nanospec.engine.engine import Engine

REFUSED = 60  # steps of an engine while waiting is refused


def environment(rows: Rows) -> None:
    found = common.environment()
    shown = found.get("gpu", "no GPU")
    if program := shutil.which("nvidia-smi"):
        asked = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or shown
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rows.add(f"{shown}; {versions}; commit {found['commit']}", headline=True, environment=found)
    limits = events.ceilings(rows.device)
    text = f"copy {limits['bandwidth'] / 1e12:.2f} TB/s, matrix {limits['flops'] / 1e12:.0f} TFLOP/s"
    rows.add(text, headline=True, **limits)


# ---- is it right ---------------------------------------------------------------------------------

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "K=0 captured": (0, {}),
    "K=4 captured": (4, {}),
    "K=4 eager": (4, {"enforce_eager": True}),
    "K=4 captured, without lag": (4, {"async_scheduling": False}),
    "K=4, prompts in pieces": (4, {"max_num_batched_tokens": 32}),
}


def equality(rows: Rows) -> None:
    model, jobs = tiny.make_model(rows.device, rows.dtype), tiny.make_jobs()
    plain = tiny.make_engine(model, 0, 1, enforce_eager=True, async_scheduling=False)
    expected = [tiny.run(plain, [job])[0] for job in jobs]
    for name, (k, options) in WAYS.items():
        with rows.attempt(f"on = off, {name}"):
            found = tiny.run(tiny.make_engine(model, k, 4, **options), jobs)
            wrong = tiny.differing(found, expected)
            accepted = sum(request.stats.num_accepted for request in found)
            rows.failed += bool(wrong) or (k > 0 and not accepted)
            text = f"on = off, {name}: {wrong} of {len(jobs)} outputs differ, {accepted} drafts accepted"
            rows.add(text, headline=True, differing=wrong, accepted=accepted)


@contextmanager
def refusing() -> Any:
    """Whatever waits for the device is an error inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waiting(rows: Rows) -> None:
    """Steps alone (block tables grow meanwhile), and with a request that is admitted, or has to stop."""
    model = tiny.make_model(rows.device, rows.dtype)
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    for k in (0, 4):
        for what in ("steady", "admission", "abort"):
            engine = tiny.make_engine(model, k, 4, window=1024, lazy_capture=False)
            requests = [engine.add([5, 9, 5, 9, 5, i], params) for i in range(2)]
            for _ in range(12):
                engine.step()
            try:
                with refusing():
                    for i in range(REFUSED):
                        if what == "admission" and i == 5:
                            engine.add([1, 2, 3], SamplingParams(max_tokens=3, temperature=0))
                        if what == "abort" and i == 5:
                            engine.abort(requests[0])
                        engine.step()
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                at = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
                rows.failed += 1
                text = f"K={k} {what}: WAITS, at {' '.join(at[-4:])}: {str(error).splitlines()[0][:120]}"
                rows.add(text, headline=True, what=f"{what} K={k}", waits=True, at=at)
            else:
                rows.add(f"K={k} {what}: nothing waits", headline=True, what=f"{what} K={k}", waits=False)
            engine.abort_all()


# ---- how fast is it ------------------------------------------------------------------------------


def speed(rows: Rows, shape: str, repeats: int) -> None:
    """One engine, recorded anew for each K with dependent launch and without; the replays take turns."""
    model, config = load_shape(shape, rows)
    context = 64 if rows.cpu else 1024
    machine = roofline.Machine(**events.ceilings(rows.device))
    engine = make_engine(model, 1, context + 256, 4)
    worker = engine.worker
    graphs = worker.graphs
    assert graphs is not None
    graphs.ks = [0, 4]
    captures: dict[tuple[str, int], Any] = {}
    for pdl in ("1", "0"):
        os.environ["NANOSPEC_PDL"] = pdl
        for k in (0, 4):
            with rows.attempt(f"{shape} K={k} dependent launch {pdl}"):
                captures[pdl, k] = graphs.capture(Bucket(1, k))
                ms = step_ms(worker, Bucket(1, k), context, 5)
                rows.add(f"{shape} K={k} dependent launch {pdl}: {ms:.3f} ms at first sight", first_ms=ms)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in captures}
    for _ in range(repeats):
        for key, capture in captures.items():
            graphs.captures[Bucket(1, key[1])] = capture
            times[key].append(step_ms(worker, Bucket(1, key[1]), context, 5))
    median = {key: statistics.median(values) for key, values in times.items()}
    for (pdl, k), ms in median.items():
        limit = roofline.account(config, 1, k, context).bound(machine)
        target = TARGETS.get(shape) if k == 0 else None
        name = f"{shape} B=1 K={k} dependent launch {'on' if pdl == '1' else 'off'}"
        said = f", {target.judge(ms)} ({target})" if target else ""
        rows.add(
            f"{name}: {ms:.3f} ms, {limit / ms:.0%} of the limit{said}",
            headline=True, shape=shape, batch=1, k=k, context=context, pdl=pdl == "1", ms=round(ms, 4),
            spread=round(events.spread(times[pdl, k]), 3), limit_ms=round(limit, 4),
        )  # fmt: skip
    for pdl in ("1", "0"):
        if (pdl, 0) in median and (pdl, 4) in median:
            ratio, target = median[pdl, 4] / median[pdl, 0], TARGETS["t(4)/t(0)"]
            text = f"{shape} B=1 t(4)/t(0) = {ratio:.3f}, {target.judge(ratio)} ({target})"
            rows.add(text, headline=pdl == "1", shape=shape, ratio=round(ratio, 4), pdl=pdl == "1")


def once(rows: Rows) -> None:
    """A few steps, captured, of two rows."""
    engine = tiny.make_engine(tiny.make_model(rows.device, rows.dtype), 4, 2, window=128)
    found = tiny.run(engine, tiny.make_jobs(2, 8, 20))
    rows.add(f"{len(found)} requests ran", tokens=sum(len(request.output_ids) for request in found))


def memory(rows: Rows, shape: str) -> None:
    """The default settings, all steps captured, and every row used."""
    begin = time.perf_counter()
    model, _ = load_shape(shape, rows)
    config = EngineConfig(max_model_len=512 if rows.cpu else 8192, max_num_seqs=4 if rows.cpu else 64,
                          enforce_eager=False)  # fmt: skip
    engine = Engine(config, Worker(config, model, NgramDrafter(config.spec)))
    seconds, graphs = time.perf_counter() - begin, engine.worker.graphs
    assert graphs is not None
    at_start = torch.cuda.mem_get_info()[0]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    jobs = [([i % 7, 5, 9] * 100, params) for i in range(config.max_num_seqs)]
    tiny.run(engine, jobs)
    free, total = torch.cuda.mem_get_info()
    gib = {
        "cache": engine.worker.kv_cache.nbytes / 2**30, "graphs": graphs.bytes / 2**30,
        "free_at_start": at_start / 2**30, "free": free / 2**30, "total": total / 2**30,
    }  # fmt: skip
    said = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in gib.items())
    text = f"{shape} start {seconds:.1f} s, {len(graphs.captures)} steps captured in {graphs.seconds:.1f} s"
    rows.add(f"{text}; GiB: {said}", headline=True, shape=shape, gib=gib, seconds=seconds)


def measure(rows: Rows, args: argparse.Namespace) -> None:
    if args.what == "speed":
        speed(rows, args.shape, args.repeats)
    elif args.what == "memory":
        memory(rows, args.shape)
    else:
        {"environment": environment, "equality": equality, "waiting": waiting, "once": once}[args.what](rows)


def main(argv: list[str] | None = None) -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("what", choices=["environment", "equality", "waiting", "speed", "once", "memory"])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--part", default="smoke", help="whose file the rows are written to")
    known, _ = parser.parse_known_args(argv)
    run(known.part, measure, parser, argv)


if __name__ == "__main__":
    main()
