"""The one rule for which implementation runs: tensors on a GPU take the Triton kernel, tensors on a CPU the
compiled C++ of `native/` where an operation has it for their dtype, all others `naive`.
`NANOSPEC_KERNELS=triton|native|naive` or `forced(...)` overrides it, so that tests can run the whole engine
on the kernels in Triton's interpreter (`TRITON_INTERPRET=1`). Who asks for `native` and has no compiler
gets an error, not PyTorch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from .native.build import library

Backend = Literal["auto", "naive", "native", "triton"]
BACKENDS = get_args(Backend)
_backend: str = os.environ.get("NANOSPEC_KERNELS", "auto")
if _backend not in BACKENDS:
    raise ValueError(f"NANOSPEC_KERNELS={_backend!r} must be one of {', '.join(map(repr, BACKENDS))}.")


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` takes its Triton kernel."""
    return _backend == "triton" or (_backend == "auto" and tensor.is_cuda)


def use_native(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether an operation on `tensor` takes its C++, which it has for these dtypes (default: bfloat16)."""
    mine = _backend in ("auto", "native") and tensor.device.type == "cpu"
    if not mine or tensor.dtype not in (dtypes or (torch.bfloat16,)):
        return False
    return (library(insist=True) if _backend == "native" else library()) is not None


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Use `backend` for every operation inside the `with` block."""
    global _backend
    previous, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = previous
