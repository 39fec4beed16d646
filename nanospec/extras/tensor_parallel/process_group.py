"""The connections between the ranks of a model: collectives, and the leader's commands to the followers.

Collectives only move tensors. Each rank then reduces them locally, in rank order, so that all ranks compute
bitwise identical results for any message size. A collective raises RankFailed if a rank has died, or does not
take part in it within the timeout.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions

# Gather in the current stream. A stream of its own would need events to synchronize with.
_GATHER, _RECEIVE = AllgatherOptions(), BroadcastOptions()
_GATHER.asyncOp = False
_RECEIVE.timeout = timedelta(days=3650)  # the leader may be idle


class RankFailed(ConnectionError):
    """Raised when a rank died, failed or timed out."""


class ProcessGroup:
    """The connections of one rank: gloo for commands and tensors on the CPU, NCCL for tensors on a GPU. They
    are independent of `torch.distributed.init_process_group`, which the user's program may call."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device, seconds: float) -> None:
        """Connect to the other ranks, which must do so at the same time, through the store: over loopback if
        it is a file. `seconds` is the timeout. NCCL allocates its buffers here, so measure the free memory
        afterwards."""
        self.rank, self.size, self.device, self.seconds = rank, size, device, seconds
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack some of its attributes
        options: Any = timedelta(seconds=seconds)
        if isinstance(store, dist.FileStore):
            options = gloo._Options()
            options._timeout = timedelta(seconds=seconds)
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._backends: dict[str, Any] = {}  # by the type of device of the tensors
        self._backends["cpu"] = gloo(dist.PrefixStore("nanospec/gloo", store), rank, size, options)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds)
            store = dist.PrefixStore("nanospec/nccl", store)
            self._backends["cuda"] = dist.ProcessGroupNCCL(store, rank, size, options)
            self.all_gather(torch.zeros(1, device=device))

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x [...], of equal shape and dtype on every rank, into [size, ...] in rank order."""
        out = x.new_empty(self.size, *x.shape)
        self._run("_allgather_base", x.device, _bytes(out), _bytes(x.contiguous()), _GATHER)
        return out

    def send(self, command: Any) -> None:
        """Send a command from the leader to all followers."""
        data = torch.frombuffer(bytearray(pickle.dumps(command)), dtype=torch.uint8)
        self._run("broadcast", data.device, [torch.tensor([len(data)])])
        self._run("broadcast", data.device, [data])

    def receive(self) -> Any:
        """Wait for the leader's next command."""
        size = torch.zeros(1, dtype=torch.int64)
        self._run("broadcast", size.device, [size], _RECEIVE)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._run("broadcast", data.device, [data], _RECEIVE)
        return pickle.loads(data.numpy().data)

    def _run(self, collective: str, device: torch.device, *args: Any) -> None:
        """Run a collective of the backend for tensors on `device`, and wait for it."""
        try:
            getattr(self._backends[device.type], collective)(*args).wait()
        except RuntimeError as error:
            limit = f"distributed_timeout={self.seconds:g} seconds"
            raise RankFailed(f"A rank died, or did not answer within {limit}.") from error

    def close(self) -> None:
        """Leave the group. Its C++ objects must not outlive the interpreter, as their destructors need it."""
        if nccl := self._backends.pop("cuda", None):
            nccl.abort()
        self._backends.clear()


def _bytes(x: Tensor) -> Tensor:
    """Return a flat uint8 view, since gloo does not support every dtype."""
    return x.flatten().view(torch.uint8)
