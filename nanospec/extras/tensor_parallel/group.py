"""What ranks exchange: each has a tensor, all get everybody's.

Sums of parts, candidates for the next token and whole logits are what each rank computes of the same numbers
in the same order, so all have the same bits, whatever their sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from .team import GRACE

# In the stream of the kernels before and after them, which else would be waited for through events.
_GATHER, _EXCHANGE = AllgatherOptions(), AllToAllOptions()
_GATHER.asyncOp = _EXCHANGE.asyncOp = False


class Group(Protocol):
    """The ranks of a model, and which one this is."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor:
        """x [...] of every rank, equal in shape and dtype -> [size, ...] in the order of ranks."""
        ...

    def exchange(self, x: Tensor) -> Tensor:
        """x [size, ...] of every rank, x[r] for rank r -> [size, ...] in the order of who sent it."""
        ...

    def close(self) -> None:
        """Part from the others."""


class Processes:
    """A process a rank, by `torch.distributed`: NCCL on GPUs, where it can be captured, gloo on CPUs. It is a
    group of its own: a process may have several, and may use `torch.distributed` for something else."""

    def __init__(self, device: torch.device, rank: int, size: int, store: dist.Store, seconds: float) -> None:
        """Meet the others at `store`. A rank that others wait for longer than `seconds` is an error.

        What NCCL allocates for its first exchanges it has from then on, so memory may be measured.
        """
        self.device, self.rank, self.size = device, rank, size
        timeout = timedelta(seconds=seconds)
        store = dist.PrefixStore("nanospec", store)
        self._group: Any  # types of torch know only some of its methods
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._parting: threading.Thread | None = None
        self.exchange(self.gather(torch.zeros(1, device=device)))

    def gather(self, x: Tensor) -> Tensor:  # bytes, as gloo has them for every dtype
        out, given = x.new_empty(self.size, *x.shape), x.contiguous().flatten().view(torch.uint8)
        self._group._allgather_base(out.flatten().view(torch.uint8), given, _GATHER).wait()
        return out

    def exchange(self, x: Tensor) -> Tensor:
        out, given = x.new_empty(x.shape), x.contiguous().flatten().view(torch.uint8)
        self._group.alltoall_base(out.flatten().view(torch.uint8), given, [], [], _EXCHANGE).wait()
        return out

    def close(self) -> None:
        """Leave the group, in a thread, since NCCL may wait forever for a GPU whose neighbours are gone. At
        most one thread does it, and every caller waits for that one.

        The C++ group is destroyed here, before the interpreter is finalized. Its destructor releases the GIL
        and takes it again; in a thread that outlives the interpreter that would abort the process.
        """
        if self._parting is None:
            held, self._group = [self._group], None

            def end() -> None:
                group = held.pop()
                group.abort() if self.device.type == "cuda" else group.shutdown()

            self._parting = threading.Thread(target=end, daemon=True, name="parting")
            try:
                self._parting.start()
            except RuntimeError:  # at the interpreter's end no thread starts any more
                end()
        if self._parting.ident is not None:
            self._parting.join(GRACE)


def gathered(group: Group, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """A few numbers of each rank. Waits for the device."""
    found: list[list[int]] = group.gather(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()
    return found
