"""What the launchers of kernels share: the architecture they choose a configuration for, padded sizes,
tickets.

The architecture is that of the device, or the one named in `targeting(...)`, with which
`bench/compile.py` compiles every kernel for GPUs that are not there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E): GPUs compute powers of 2
# AMD has two shapes of matrix instruction and would choose by tile; one sum order needs one shape.
ONE_SHAPE = {"gfx942": {"matrix_instr_nonkdim": 16}}
NUM_TICKETS = 1 << 16
_target: str | None = None
T = TypeVar("T", bound=tuple[Any, ...])


def arch(tensor: Tensor) -> str:
    """Return the architecture of the GPU that holds `tensor`; of unknown GPUs, the nearest older one."""
    return _target or (_device_arch(tensor.device.index or 0) if tensor.is_cuda else "sm_90")


@cache
def _device_arch(index: int) -> str:
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(index)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


@contextmanager
def targeting(name: str) -> Iterator[None]:
    """Choose configurations for the architecture `name` inside the `with` block."""
    global _target
    previous, _target = _target, name
    try:
        yield
    finally:
        _target = previous


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
    """Return [NUM_TICKETS] int32 counters by which the last of several programs to finish knows that it is,
    so that it can add up what the others stored without a second launch. `user` names kernels that never run
    at the same time. Made outside of graph capture, at the first call.

    A program stores its part, waits for its threads (`tl.debug_barrier`), takes a ticket (`tl.atomic_add`,
    acquire and release) and, if it is the last one, sets the counter to zero again and reads the parts past
    the L1 cache (`.cg`).
    """
    return torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)
