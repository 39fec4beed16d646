"""Selects the implementation and target architecture of an operation, and provides helpers for launchers.

Tensors on a GPU use the Triton kernel. Tensors on a CPU use the compiled C++ of `native/` if the operation
has it for their dtype, and `naive` otherwise. `NANOSPEC_KERNELS=triton|native|naive` or `forced(...)`
overrides this, so that tests can run the whole engine on the kernels in Triton's interpreter
(`TRITON_INTERPRET=1`). With `native`, a missing compiler is an error. Launch configurations are chosen for
the device (`Target`) unless `forced` sets another GPU: `bench/compile.py` compiles for GPUs not present.

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
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from .native import library

Backend = Literal["auto", "naive", "native", "triton"]
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E); GPUs have an instruction for exp2
T = TypeVar("T", bound=tuple[Any, ...])


class Target(NamedTuple):
    """The properties of a GPU that launch configurations depend on."""

    family: str  # "sm_80" (mma), "sm_86" (mma, less shared memory), "sm_90" (wgmma), "sm_100" or "gfx942"
    multiprocessors: int
    shared: int  # maximum bytes of shared memory per program
    pdl: bool = False  # whether it has programmatic dependent launch

    def stages(self, num_bytes: int, limit: int, programs: int = 1) -> int:
        """Return the number of pipeline stages of `num_bytes`, from 1 to `limit`, so that `programs` fit on a
        multiprocessor (NVIDIA GPUs reserve 1 KiB for each). With mma and mfma, the compiler keeps one stage
        in registers."""
        buffers = ((self.shared + 1024) // programs - 1024) // num_bytes
        return min(max(buffers + (self.family not in ("sm_90", "sm_100")), 1), limit)


TARGETS = {
    "sm_80": Target("sm_80", 108, 163 << 10),  # A100
    "sm_86": Target("sm_86", 82, 99 << 10),  # RTX 3090
    "sm_89": Target("sm_86", 128, 99 << 10),  # RTX 4090
    "sm_90": Target("sm_90", 132, 227 << 10, pdl=True),  # H100
    "sm_100": Target("sm_100", 148, 227 << 10, pdl=True),  # B200
    "sm_120": Target("sm_86", 170, 99 << 10, pdl=True),  # RTX 5090
    "gfx942": Target("gfx942", 304, 64 << 10),  # MI300X
}
MIN_SHARED = 64 << 10  # bytes that attention with head dimension 256 needs

num_compiled = 0  # kernels that Triton compiled, or loaded from its cache on disk, in this process
_target: Target | None = None
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


def _count_compiled(**_: Any) -> None:
    global num_compiled
    num_compiled += 1


triton.knobs.compilation.listener = _count_compiled


@contextmanager
def forced(backend: Backend | None = None, target: Target | None = None) -> Iterator[None]:
    """Run every operation in the `with` block on `backend`, configured for `target`."""
    global _backend, _target
    previous = _backend, _target
    _backend, _target = backend or _backend, target or _target
    try:
        yield
    finally:
        _backend, _target = previous


def target_of(tensor: Tensor) -> Target:
    """Return the GPU of a tensor; an H100 for a tensor on a CPU."""
    if _target is None and tensor.is_cuda:
        return device_target(tensor.device.index or 0)
    return _target or TARGETS["sm_90"]


@cache
def device_target(index: int) -> Target:
    """Return the target of a GPU. Raises ValueError if the GPU is not supported."""
    if torch.version.hip:
        return TARGETS["gfx942"]
    gpu: Any = torch.cuda.get_device_properties(index)
    shared: int = gpu.shared_memory_per_block_optin
    if gpu.major < 8 or shared < MIN_SHARED:
        raise ValueError(
            f"{gpu.name} is not supported: it has compute capability {gpu.major}.{gpu.minor} and "
            f"{shared >> 10} KiB of shared memory; nanospec requires 8.0 and {MIN_SHARED >> 10} KiB."
        )
    with_mma = "sm_86" if shared <= TARGETS["sm_86"].shared else "sm_80"  # as all newer GPUs
    family = {9: "sm_90", 10: "sm_100"}.get(gpu.major, with_mma)
    return Target(family, gpu.multi_processor_count, shared, pdl=gpu.major >= 9)


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


def options(tensor: Tensor, dots: bool = False) -> dict[str, Any]:
    """Return the arguments of a launch on the GPU of `tensor`: the constant `PDL`, and options of the
    compiler. `dots`: whether the kernel has matrix products."""
    target = target_of(tensor)
    # Triton picks the MFMA shape by tile size, but a fixed summation order needs a fixed shape.
    chosen: dict[str, Any] = {"matrix_instr_nonkdim": 16} if dots and target.family == "gfx942" else {}
    if not target.pdl or os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("NANOSPEC_PDL") == "0":
        return {"PDL": False, **chosen}
    return {"PDL": True, "launch_pdl": True}


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
