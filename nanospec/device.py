"""What the host does with a device: choose it, wait for it, and copy from it without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def resolve_device(name: str) -> torch.device:
    """"auto" is the first GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))  # to a build for GPUs the number 3 would mean cuda:3
    except RuntimeError:
        raise ValueError(f"device={name!r} is no device; use 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} needs a GPU that this machine does not have; use 'cpu'.")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'cuda'.")
    return device


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
