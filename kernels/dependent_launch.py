"""Let a kernel begin while the one before it still runs: programmatic dependent launch, sm_90 and newer.

A kernel launched with `options(...)` and PDL set starts as soon as all programs of the kernel before it on
the stream have called `release_next` or ended. It may then read what no kernel writes, weights above all,
and must call `wait_for_previous` before it reads anything else or writes anything: every program, also one
that has nothing to do, since the next kernel takes the end of this one for the end of all before it. A
kernel that calls `release_next` only after its own wait lets the next one read early whatever was written
before itself: what comes before attention does so, because attention looks up pages before it waits.

`NANOSPEC_PDL=0` switches it off; older GPUs and the interpreter do not have it, and the functions do
nothing there.
"""

import os
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import arch

LINE = tl.constexpr(128)  # bytes


def options(tensor: Tensor) -> dict[str, Any]:
    """What a launch on the GPU of `tensor` passes on: the constant PDL, and `launch_pdl` where it is set."""
    newer = arch(tensor) in ("sm_90", "sm_100") and os.environ.get("TRITON_INTERPRET", "0") != "1"
    if newer and os.environ.get("NANOSPEC_PDL", "1") != "0":
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def release_next(PDL: tl.constexpr):
    """From here on the next kernel may start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """What the kernels before wrote may be read from here on, and what they read be written."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Ask for the lines at `pointers` to be brought to the L2 cache. Assembly, because the compiler would
    move an ordinary load behind the wait."""
    if PDL:
        line: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(line, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)
