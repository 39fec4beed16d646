"""Choose a device and make it the current one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

from ..text.checks import shown

Method = TypeVar("Method", bound=Callable[..., Any])


def resolve_device(name: str) -> torch.device:
    """ "auto" is a GPU if there is one. A GPU without a number is the current one, and has its number from
    then on, since what is current may change."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(str(name))  # to a build for GPUs the number 3 would mean cuda:3
    except RuntimeError:
        raise ValueError(f"device={shown(name)} is no device; use 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={shown(name)} needs a GPU that this machine does not have; use 'cpu'.")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device={shown(name)} is not supported; use 'auto', 'cpu' or 'cuda'.")
    return _numbered(device) if device.type == "cuda" else device


def _numbered(device: torch.device) -> torch.device:
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"device='cuda:{index}' is not there: this machine has {count} GPU{'s' * (count > 1)}, counted "
            f"from 0; use at most 'cuda:{count - 1}'."
        )
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one of this thread: that is where Triton launches, and whose streams, events
    and graphs `torch.cuda` deals with. Threads take turns, so it is done for every call."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(method: Method) -> Method:
    """A method of an object with a `device`, run while that is the current one."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with current(self.device):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]
