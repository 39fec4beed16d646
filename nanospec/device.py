"""What the host does with a device: wait for it, and copy from it without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Start copying a tensor to the host, behind what is queued; the result waits for it and gives lists."""
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
    """Wait until a GPU has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
