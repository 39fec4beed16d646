"""The device and the CPU threads that an engine uses.

The number of CPU threads does not change after a model is loaded: it affects the last bit of bf16 sums.
"""

import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..kernels.launch import find_gpu
from ..models.cpu import computed_by
from ..models.decoder import Model
from ..text.validation import shown

DEFAULT_THREADS = torch.get_num_threads()
Method = TypeVar("Method", bound=Callable[..., Any])


def resolve_device(name: str) -> torch.device:
    """Return the `torch.device` for a name: for "auto", a supported GPU if there is one; for "cuda", the
    index of the current GPU. Raises ValueError if the device is missing or not supported."""
    if name == "auto":
        try:
            return resolve_device("cuda" if torch.cuda.is_available() else "cpu")
        except ValueError as error:
            warnings.warn(f"{error} The CPU is used.", stacklevel=2)
            return torch.device("cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(name)):
        raise ValueError(f"device={shown(name)} is not supported; use 'auto', 'cpu' or 'cuda'.")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={shown(name)} is not available: no GPU was found; use 'cpu'.")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(f"device='cuda:{index}' does not exist; the last GPU is 'cuda:{count - 1}'.")
    find_gpu(index)  # raises ValueError
    return torch.device("cuda", index)


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device in a `with` block. Needed for every call, as any thread may call."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def with_device(method: Method) -> Method:
    """Decorate a method to run with `self.device` as the current device."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with use_device(self.device):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def compute_info(model: Model) -> dict[str, str | int]:
    """Return the device, data type, implementation and number of CPU threads of a model, for display."""
    dtype = str(model.dtype).removeprefix("torch.")
    info: dict[str, str | int] = {"device": str(model.device), "dtype": dtype, "by": computed_by(model)}
    return info | ({"threads": torch.get_num_threads()} if model.device.type == "cpu" else {})


def use_threads(threads: int | Literal["auto"]) -> None:
    """Set the number of CPU threads, see `EngineConfig`."""
    if threads != "auto":
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(math.ceil(min(cpu_quota(), DEFAULT_THREADS)), 1))


def cpu_quota(group_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU quota of this process from cgroups (version 2), in CPUs; infinity if unlimited."""
    quotas = [math.inf]
    with suppress(OSError, ValueError):
        group = root / group_file.read_text().partition("::")[2].strip().strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
                quotas += [int(quota) / int(period)] if quota != "max" else []
    return min(quotas)
