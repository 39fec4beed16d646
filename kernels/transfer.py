"""Copies between host and device that do not wait for the step in flight.

`torch.tensor(values, device="cuda")`, and every copy from or to memory that is not pinned, synchronize with
the device. Here values pass through pinned memory and are copied behind the queued work; torch's allocator
of pinned memory does not reuse a buffer before its copy has finished.

`write` sends all that the host writes into rows on the device in one copy and one launch:

    writes   where each of them goes, and its values; no two may touch the same place
    words    [N] int64 on the device: five for each write, then the values, which are integers or the bits
             of floats:  address of the first place, bytes of an element, where its values begin in `words`,
             how many there are, how many places are written

Because the words contain addresses, one compiled kernel writes to any tensor: a column of the table or the
rows that a drafter keeps. A write of more places than values repeats the last one: this fills the rest of a
row, or all of it. Kernel: up to `SHARES` programs per write, each of 1024 places at a time.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import use_triton

HEADER = tl.constexpr(5)  # words
BLOCK = 1024
SHARES = 16

Write = tuple[Tensor, int, int, Sequence[Any]]
"""(tensor, row, end, values): the values, at least one, for the places up to `end` of a row of a contiguous
tensor [S, width]; of a tensor [S], row by row, place 0."""


def upload(
    values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """Copy numbers of the host (nested lists or a tensor) to the device, into `out` if it is given."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Start copying a tensor to the host; return a function that waits for the copy and gives lists."""
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


def write(writes: Sequence[Write]) -> None:
    """Do all of them. Never waits for a GPU."""
    if writes:
        (launch if use_triton(writes[0][0]) else naive)(writes)


def naive(writes: Sequence[Write]) -> None:
    for tensor, row, end, values in writes:
        columns, count = tensor if tensor.dim() > 1 else tensor[:, None], len(values)
        columns[row, :count] = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
        columns[row, count:end] = values[-1]


@triton.jit
def _write(words, BLOCK: tl.constexpr):
    header = words + tl.program_id(0) * HEADER
    address, size = tl.load(header), tl.load(header + 1)
    values = words + tl.load(header + 2)
    last, length = tl.load(header + 3) - 1, tl.load(header + 4).to(tl.int32)
    for begin in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < length
        value = tl.load(values + tl.minimum(i, last), inside)
        if size == 1:
            tl.store(address.to(tl.pointer_type(tl.int8)) + i, value.to(tl.int8), inside)
        elif size == 4:
            tl.store(address.to(tl.pointer_type(tl.int32)) + i, value.to(tl.int32), inside)
        else:
            tl.store(address.to(tl.pointer_type(tl.int64)) + i, value, inside)


def pack(writes: Sequence[Write]) -> array:
    """Return the words."""
    headers, words = array("q"), array("q")
    for tensor, row, end, values in writes:
        size, width, is_float = tensor.element_size(), tensor.stride(0), tensor.dtype == torch.float32
        address = tensor.data_ptr() + row * width * size
        begin = len(writes) * HEADER.value + len(words)
        headers.extend((address, size, begin, len(values), end))
        words.extend(array("i", array("f", values).tobytes()).tolist() if is_float else values)
    return headers + words


def launch(writes: Sequence[Write]) -> None:
    words = torch.frombuffer(pack(writes), dtype=torch.int64)
    longest = max(end for _, _, end, _ in writes)
    shares = min(triton.cdiv(longest, BLOCK), SHARES)
    device = writes[0][0].device
    _write[(len(writes), shares)](upload(words, torch.int64, device), BLOCK=BLOCK, num_warps=4)
