"""Compile kernels with known machine code for sm_90 and print what `bench/machine_code.py` reads in it.

Tests run this in a subprocess, since triton is the interpreter in their own process.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import triton
import triton.language as tl

from bench.compile import TARGETS, _Recorded, _source, sass
from bench.machine_code import read
from nanospec.kernels.launch import prefetch, release_next, wait_for_previous


@triton.jit
def product(x, w, out, K, PDL: tl.constexpr, LATE: tl.constexpr):
    """Compute out [64, 64] = w [64, K] @ x [64, K].T; LATE prefetches too late."""
    row, k = tl.arange(0, 64), tl.arange(0, 64)
    release_next(PDL)
    lines = w + row * K
    if LATE:
        wait_for_previous(PDL)
        prefetch(lines, PDL)
    else:
        prefetch(lines, PDL)
        wait_for_previous(PDL)
    acc = tl.zeros([64, 64], tl.float32)
    for step in range(K // 64):
        at = row[:, None] * K + step * 64 + k[None, :]
        acc = tl.dot(tl.load(w + at), tl.trans(tl.load(x + at)), acc)
    tl.store(out + row[:, None] * 64 + k[None, :], acc.to(tl.bfloat16))


@triton.jit
def gathered(x, w, out, pages, K, PDL: tl.constexpr, LATE: tl.constexpr):
    """Compute the same for a w whose blocks of 64 columns are scattered according to `pages`."""
    row, k = tl.arange(0, 64), tl.arange(0, 64)
    acc = tl.zeros([64, 64], tl.float32)
    for step in range(K // 64):
        page = tl.load(pages + step)
        at = row[:, None] * 64 + k[None, :]
        block = tl.load(w + page * 4096 + at)
        acc = tl.dot(block, tl.trans(tl.load(x + row[:, None] * K + step * 64 + k[None, :])), acc)
    tl.store(out + row[:, None] * 64 + k[None, :], acc.to(tl.bfloat16))


@triton.jit
def narrow(x, out, N):
    """Load 2 bytes at a time, since the rows' alignment is unknown; no tensor cores."""
    i = tl.arange(0, 128)
    value = tl.load(x + tl.program_id(0) * N + i)
    tl.store(out + tl.program_id(0) * 128 + i, value)


def main() -> None:
    x = torch.empty(64, 1024, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(16, dtype=torch.int32, device="meta")
    result = {}
    for name, kernel, args, options in (
        ("three stages", product, (x, x, x, 1024), {"num_stages": 3, "PDL": True, "LATE": False}),
        ("one stage", product, (x, x, x, 1024), {"num_stages": 1, "PDL": True, "LATE": True}),
        ("gathered", gathered, (x, x, x, pages, 1024), {"num_stages": 4, "PDL": False, "LATE": False}),
        ("narrow", narrow, (x, x, 1023), {}),
    ):
        source, settings = _source(_Recorded(kernel, args, options), "sm_90")
        if options.get("PDL"):
            settings["launch_pdl"] = True
        code = read(sass(triton.compile(source, target=TARGETS["sm_90"], options=settings).asm["cubin"]))
        result[name] = {**asdict(code), "text": str(code.loop)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
