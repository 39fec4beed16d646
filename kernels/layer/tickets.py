"""Counters by which the last of several programs to finish knows itself, so that it can add up what the
others left without a second launch.

A program stores its part, waits for its threads (`tl.debug_barrier`), takes a ticket (`tl.atomic_add`,
acquire and release) and, if it is the last one, puts the counter back to zero and reads the parts past the
L1 cache (`.cg`).
"""

from functools import cache

import torch
from torch import Tensor

COUNT = 1 << 16


@cache
def tickets(device: torch.device, user: str) -> Tensor:
    """[COUNT] int32, zero between the launches of `user`: kernels that never run at the same time. Made
    outside of graph capture, at the first call."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)
