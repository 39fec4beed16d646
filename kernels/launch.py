"""How an operation is run: which of its implementations, for which architecture, and what launchers share.

Tensors on a GPU take the Triton kernel, tensors on a CPU the compiled C++ of `native/` where an operation
has it for their dtype, all others `naive`. `NANOSPEC_KERNELS=triton|native|naive` or `forced(...)` overrides
this, so that tests can run the whole engine on the kernels in Triton's interpreter (`TRITON_INTERPRET=1`).
With `native` a missing compiler is an error. The architecture is that of the device, or the one given to
`forced`, with which `bench/compile.py` compiles every kernel for GPUs that are not there.

Programmatic dependent launch (sm_90 and newer) lets a kernel begin while the one before it still runs. A
kernel launched with `options(...)` starts as soon as all programs of the kernel before it on the stream have
called `release_next` or ended. It may then read what no kernel writes, weights above all, and must call
`wait_for_previous` before it reads anything else or writes anything: every program, also one that has nothing
to do, since the next kernel takes the end of this one for the end of all before it. A kernel that calls
`release_next` only after its own wait lets the next one read early whatever was written before itself: what
comes before attention does so, because attention looks up pages before it waits. `NANOSPEC_PDL=0` switches
it off; without it, these functions do nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from .native import library

Backend = Literal["auto", "naive", "native", "triton"]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E): GPUs compute powers of 2
# AMD has two shapes of matrix instruction and would choose by tile; one sum order needs one shape.
ONE_SHAPE = {"gfx942": {"matrix_instr_nonkdim": 16}}
T = TypeVar("T", bound=tuple[Any, ...])

_target: str | None = None
_backend: str = os.environ.get("NANOSPEC_KERNELS", "auto")
if _backend not in get_args(Backend):
    raise ValueError(f"NANOSPEC_KERNELS={_backend!r} must be one of {', '.join(get_args(Backend))}.")


def use_triton(tensor: Tensor) -> bool:
    """Return whether an operation on `tensor` takes its Triton kernel."""
    return _backend == "triton" or (_backend == "auto" and tensor.is_cuda)


def use_native(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether an operation on `tensor` takes its C++, which it has for these dtypes (or bfloat16)."""
    mine = _backend in ("auto", "native") and tensor.device.type == "cpu"
    takes = mine and tensor.dtype in (dtypes or (torch.bfloat16,))
    return takes and (library(insist=True) if _backend == "native" else library()) is not None


@contextmanager
def forced(backend: Backend | None = None, architecture: str | None = None) -> Iterator[None]:
    """Use `backend`, and configurations for `architecture`, for every operation inside the `with` block."""
    global _backend, _target
    previous = _backend, _target
    _backend, _target = backend or _backend, architecture or _target
    try:
        yield
    finally:
        _backend, _target = previous


def arch(tensor: Tensor) -> str:
    """Return the architecture of the GPU that holds `tensor`; of unknown GPUs, the nearest older one."""
    return _target or (_device_arch(tensor.device.index or 0) if tensor.is_cuda else "sm_90")


@cache
def _device_arch(index: int) -> str:
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(index)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def wrapped(constants: T) -> T:
    """Return a named tuple for a kernel's parameter that is annotated `tl.constexpr`. The compiler needs each
    element wrapped, since triton 3.6 fails on plain numbers of a tuple; the interpreter needs plain ones."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return constants
    return type(constants)(*map(tl.constexpr, constants))


@cache
def tickets(device: torch.device, user: str) -> Tensor:
    """Return [65536] int32 counters by which the last of several programs to finish knows that it is,
    so that it can add up what the others stored without a second launch. `user` names kernels that never run
    at the same time. Made outside of graph capture, at the first call.

    A program stores its part, waits for its threads (`tl.debug_barrier`), takes a ticket (`tl.atomic_add`,
    acquire and release) and, if it is the last one, sets the counter to zero again and reads the parts past
    the L1 cache (`.cg`).
    """
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def options(tensor: Tensor) -> dict[str, Any]:
    """Return what a launch on the GPU of `tensor` passes on: the constant PDL, and `launch_pdl` if set."""
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
