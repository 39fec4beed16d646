"""What the launchers share: the architecture they choose a configuration for, and padded sizes.

The architecture is that of the device, or the one named in `targeting(...)`, with which
`bench/compile.py` compiles every kernel for GPUs that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
_target: str | None = None


def arch(tensor: Tensor) -> str:
    """The table key for the GPU that holds `tensor`; of unknown GPUs, that of the nearest older one."""
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
