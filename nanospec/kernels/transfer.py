"""Copies between host and device that do not wait for the step in flight.

`torch.tensor(values, device="cuda")` and copies from or to unpinned memory synchronize with the device. These
functions use pinned memory and enqueue the copy after pending work. PyTorch's caching allocator of pinned
memory does not reuse a buffer before the copy has completed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor,
    dtype: torch.dtype,
    device: torch.device,
    out: Tensor | None = None,
) -> Tensor:
    """Copy host numbers (nested lists, an array or a tensor) to the device, into `out` if given."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Start copying a tensor to the host. Return a function that waits for it and returns nested lists."""
    if not tensor.is_cuda:
        values = tensor.tolist()
        return lambda: values
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[Any]:
        arrived.synchronize()
        values: list[Any] = pinned.tolist()
        return values

    return wait


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(tensor: Tensor, row: int, values: Sequence[Any] | NDArray[Any], end: int | None = None) -> None:
    """Write `values` to tensor[row, :n] and, if `end` is given, values[-1] to tensor[row, n:end]."""
    upload(values, tensor.dtype, tensor.device, out=tensor[row, : len(values)])
    if end is not None and end > len(values):
        tensor[row, len(values) : end].fill_(values[-1])
