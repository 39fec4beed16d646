"""Selects the implementation and target architecture of an operation, and provides helpers for launchers.

Tensors on a GPU use the Triton kernel. Tensors on a CPU use the compiled C++ of `native/` if the operation
has it for their dtype, and `naive` otherwise. `NANOSPEC_KERNELS=triton|native|naive` or `forced(...)`
overrides this, so that tests can run the whole engine on the kernels in Triton's interpreter
(`TRITON_INTERPRET=1`). With `native`, a missing compiler is an error. The architecture is that of the device
unless `forced` sets it, which `bench/compile.py` does to compile every kernel for GPUs that are not present.

Programmatic dependent launch (PDL, sm_90 and newer) lets a kernel begin while the previous one is running.
A kernel launched with `options(...)` starts as soon as all programs of the previous kernel on the stream have
called `release_next` or exited. Until it calls `wait_for_previous`, it may only read memory that no kernel
writes, such as weights, and must not write. Every program must call it, even one that returns early, because
the next kernel assumes that once this one has completed, all earlier ones have. If a kernel calls
`release_next` after its own wait, the next kernel may also read, before waiting, everything that was written
before this kernel. The kernel before attention does so, because attention reads the block table before it
waits. `NANOSPEC_PDL=0` disables PDL; without it, these functions do nothing.
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
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E); GPUs have an instruction for exp2
# AMD: Triton picks the MFMA shape by tile size, but a fixed summation order needs a fixed shape.
MFMA_OPTIONS = {"gfx942": {"matrix_instr_nonkdim": 16}}
T = TypeVar("T", bound=tuple[Any, ...])

_target: str | None = None
_backend: str = os.environ.get("NANOSPEC_KERNELS", "auto")
if _backend not in get_args(Backend):
    raise ValueError(f"NANOSPEC_KERNELS={_backend!r} must be one of {', '.join(get_args(Backend))}.")


def use_triton(tensor: Tensor) -> bool:
    """Return whether an operation on `tensor` uses its Triton kernel."""
    return _backend == "triton" or (_backend == "auto" and tensor.is_cuda)


def use_native(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether an operation on `tensor` uses C++, which supports `dtypes` (default: bfloat16)."""
    enabled = _backend in ("auto", "native") and tensor.device.type == "cpu"
    supported = enabled and tensor.dtype in (dtypes or (torch.bfloat16,))
    return supported and (library(required=True) if _backend == "native" else library()) is not None


@contextmanager
def forced(backend: Backend | None = None, architecture: str | None = None) -> Iterator[None]:
    """Run every operation in the `with` block on `backend`, configured for `architecture`."""
    global _backend, _target
    previous = _backend, _target
    _backend, _target = backend or _backend, architecture or _target
    try:
        yield
    finally:
        _backend, _target = previous


def arch(tensor: Tensor) -> str:
    """Return the entry of ARCHITECTURES to tune for: the nearest older one, gfx942 on AMD, sm_90 on a CPU."""
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
    """Wrap the elements of a named tuple that is passed to a kernel parameter annotated `tl.constexpr`.
    Triton 3.6 fails to compile plain numbers in such a tuple; the interpreter requires them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return constants
    return type(constants)(*map(tl.constexpr, constants))


@cache
def counters(device: torch.device, user: str) -> Tensor:
    """Return [65536] int32 counters with which several programs determine the last of them to finish, so
    that it can add up their partial results without a second launch. Kernels with the same `user` must not
    overlap. The first call allocates the counters and must be outside of graph capture.

    A program stores its partial result, synchronizes its threads (`tl.debug_barrier`) and increments the
    counter (`tl.atomic_add`, acquire and release). The last one resets it and reads the partial results,
    bypassing the L1 cache (`.cg`).
    """
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def options(tensor: Tensor) -> dict[str, Any]:
    """Return the PDL arguments of a launch on the GPU of `tensor`: the constant `PDL` and `launch_pdl`."""
    newer = arch(tensor) in ("sm_90", "sm_100") and os.environ.get("TRITON_INTERPRET", "0") != "1"
    if newer and os.environ.get("NANOSPEC_PDL", "1") != "0":
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def release_next(PDL: tl.constexpr):
    """Allow the next kernel to start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all earlier kernels have completed and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Prefetch the cache lines at `pointers` into the L2 cache. This is inline assembly because the compiler
    would move an ordinary load past the wait."""
    if PDL:
        line: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(line, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)
