"""Memory as the system gives it: pages of zeros, which take room once they are written."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

PIECE = 64 << 20  # bytes that an arena asks for at once
LINE = 64  # bytes


def pages(size: int, large: bool) -> mmap.mmap:
    """So many bytes, of which untouched pages cost neither time nor memory. The system takes all back when
    the last tensor in them dies. Large pages are read faster; the first byte of each costs 2 MiB. OSError
    where there is no room."""
    try:
        found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(f"The system gives no {size / 2**20:.0f} MiB of memory ({error.strerror}).") from None
    with contextlib.suppress(AttributeError, OSError):  # not on Linux; a kernel without large pages
        found.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE)
    return found


class Arena:
    """Large pages for tensors of which most are too small to fill one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pages: mmap.mmap | None = None
        self._used = 0  # bytes

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """`torch.zeros`, after the tensor that was asked for before it."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        with self._lock:
            if self._pages is None or self._used + size > len(self._pages):
                self._pages, self._used = pages(max(size, PIECE), large=True), 0
            found = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used)
            self._used += -(-size // LINE) * LINE
        return found.view(*shape)
