"""Selects the implementation and target architecture of an operation, and provides helpers for launchers.

Tensors on a GPU use the Triton kernel. Tensors on a CPU use the compiled C++ of `native/` if the operation
has it for their dtype, and `naive` otherwise. `NANOSPEC_KERNELS=triton|native|naive` or `forced(...)`
overrides this, so that tests can run the whole engine on the kernels in Triton's interpreter
(`TRITON_INTERPRET=1`). With `native`, a missing compiler is an error. Launch configurations are chosen for
the GPU (`Gpu`) unless `forced` sets another one: `bench/compile.py` compiles for GPUs not present.

Programmatic dependent launch (PDL, sm_90 and newer) starts a kernel as soon as all programs of the previous
one have called `release_next` or exited. Until it calls `wait_for_previous`, a kernel may only read memory
that no kernel writes, such as weights, and must not write. Every program must call it, even one that returns
early, because the next kernel assumes that once this one has completed, all earlier ones have. If a kernel
calls `release_next` after its own wait, the next ones may also read, before waiting, what was written before
it: `rope_cache` does so, because attention reads the batch before it waits. Without PDL, these functions do
nothing. `NANOSPEC_PDL=0` disables it.
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


class Gpu(NamedTuple):
    """The properties of a GPU that determine launch configurations."""

    family: str  # "sm_80" (mma), "sm_86" (mma, less shared memory), "sm_90" (wgmma), "sm_100" or "gfx942"
    multiprocessors: int
    shared: int  # maximum bytes of shared memory per program
    pdl: bool = False  # whether it has programmatic dependent launch

    def uses_pdl(self, num_tokens: int) -> bool:
        """Return whether kernels for this number of tokens use PDL. It saves up to 12 % of a step of up to 32
        tokens and 6 % of one of more than 64, but those in between take up to 8 % longer (H100, H200)."""
        return self.pdl and not 32 < num_tokens <= 64

    def stages(self, num_bytes: int, limit: int, programs: int = 1) -> int:
        """Return the number of pipeline stages of `num_bytes`, from 1 to `limit`, so that `programs` fit on a
        multiprocessor."""
        num_buffers = ((self.shared + 1024) // programs - 1024) // num_bytes  # 1 KiB is reserved for each
        if self.family not in ("sm_90", "sm_100"):
            num_buffers += 1  # wgmma and tcgen05 read shared memory; others copy one stage to registers
        return min(max(num_buffers, 1), limit)


GPUS = {
    "sm_80": Gpu("sm_80", 108, 163 << 10),  # A100
    "sm_86": Gpu("sm_86", 82, 99 << 10),  # RTX 3090
    "sm_89": Gpu("sm_86", 128, 99 << 10),  # RTX 4090
    "sm_90": Gpu("sm_90", 132, 227 << 10, pdl=True),  # H100
    "sm_100": Gpu("sm_100", 148, 227 << 10, pdl=True),  # B200
    "sm_120": Gpu("sm_86", 170, 99 << 10, pdl=True),  # RTX 5090
    "gfx942": Gpu("gfx942", 304, 64 << 10),  # MI300X
}

num_compiled = 0  # kernels that Triton compiled, or loaded from its cache on disk, in this process
_gpu: Gpu | None = None
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
def forced(backend: Backend | None = None, gpu: Gpu | None = None) -> Iterator[None]:
    """Run every operation in the `with` block on `backend`, configured for `gpu`."""
    global _backend, _gpu
    previous = _backend, _gpu
    _backend, _gpu = backend or _backend, gpu or _gpu
    try:
        yield
    finally:
        _backend, _gpu = previous


def gpu_of(tensor: Tensor) -> Gpu:
    """Return the GPU to configure a launch for: that of `forced`, else the tensor's; on a CPU, an H100."""
    if _gpu is None and tensor.is_cuda:
        return find_gpu(tensor.device.index or 0)
    return _gpu or GPUS["sm_90"]


@cache
def find_gpu(index: int) -> Gpu:
    """Return the properties of a GPU (any AMD GPU: an MI300X). Raises ValueError if it is too old."""
    if torch.version.hip:
        return GPUS["gfx942"]
    gpu: Any = torch.cuda.get_device_properties(index)
    if gpu.major < 8:
        raise ValueError(f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}; nanospec needs 8.0.")
    shared: int = gpu.shared_memory_per_block_optin  # at least 99 KiB, which suffices in any dtype
    mma = "sm_80" if shared > GPUS["sm_86"].shared else "sm_86"
    family = {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(gpu.major, mma)
    return Gpu(family, gpu.multi_processor_count, shared, pdl=gpu.major >= 9)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def wrapped(constants: T) -> T:
    """Wrap the elements of a named tuple that is passed to a kernel parameter annotated `tl.constexpr`.
    Triton 3.6 fails to compile plain numbers in such a tuple; the interpreter requires them."""
    if is_interpreted():
        return constants
    return type(constants)(*map(tl.constexpr, constants))


def options(tensor: Tensor, num_tokens: int, dots: bool = False) -> dict[str, Any]:
    """Return the arguments of a launch for `num_tokens` tokens on the GPU of `tensor`: the constant `PDL`,
    and options of the compiler. `dots`: whether the kernel has matrix products."""
    gpu = gpu_of(tensor)
    pdl = gpu.uses_pdl(num_tokens) and not is_interpreted() and os.environ.get("NANOSPEC_PDL") != "0"
    chosen = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    if dots and gpu.family == "gfx942":  # a fixed shape, since it determines the order of sums
        chosen["matrix_instr_nonkdim"] = 16
    return chosen


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
