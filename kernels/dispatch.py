"""The one rule for which implementation runs: tensors on a GPU take the Triton kernel, tensors on a
CPU take `naive`. `NANOSPEC_KERNELS=triton|naive` or `forced(...)` overrides it, so that tests can run
the whole engine on the kernels in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

Backend = Literal["auto", "naive", "triton"]
_backend: str = os.environ.get("NANOSPEC_KERNELS", "auto")
if _backend not in ("auto", "naive", "triton"):
    raise ValueError(f"NANOSPEC_KERNELS={_backend!r} must be 'auto', 'naive' or 'triton'.")


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` takes its Triton kernel."""
    return _backend == "triton" or (_backend == "auto" and tensor.is_cuda)


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Use `backend` for every operation inside the `with` block."""
    global _backend
    previous, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = previous
