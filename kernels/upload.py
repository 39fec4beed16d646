"""What goes from the host to a device, without either waiting for the other.

`torch.tensor(values, device="cuda")`, and every copy from memory that is not pinned, wait for the step in
flight. Here the values are put into pinned memory and copied behind what is queued; torch's allocator of
pinned memory gives none of it out again before the copy is done.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """Numbers of the host (lists of them, or a tensor) on a device, in `out` or in memory of their own. Never
    waits for it."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)
