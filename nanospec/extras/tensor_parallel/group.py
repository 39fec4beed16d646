"""Collectives among the ranks of a model, and the leader's commands to the followers.

Collectives only move tensors. Each rank then reduces them locally, in rank order, so that all ranks compute
bitwise identical results for any message size.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions

START = 300  # time limit in seconds for all ranks to start and connect over gloo
CLOSING = 10.0  # time limit in seconds for NCCL to leave the group

# Run collectives in the current stream. A stream of their own would need events to synchronize with.
_GATHER, _EXCHANGE = AllgatherOptions(), AllToAllOptions()
_GATHER.asyncOp = _EXCHANGE.asyncOp = False
_SEND, _RECEIVE = BroadcastOptions(), BroadcastOptions()
_RECEIVE.timeout = timedelta(days=3650)  # the leader may be idle


class RankInfo(NamedTuple):
    """The position of a rank among all ranks.

    Attributes:
        local_rank, local_size: the rank's index on its machine, and the number of ranks on that machine.
        path: the file of the store if the leader started the ranks; "" under torchrun, which provides one.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    path: str = ""

    @property
    def gpu(self) -> int:
        """The index of the rank's GPU: 0 if only one is visible, as some launchers arrange."""
        return 0 if os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0 else self.local_rank

    def store(self) -> dist.Store:
        """Connect to the store through which the ranks find each other."""
        if self.path:
            return dist.FileStore(self.path, self.size)
        return next(dist.rendezvous("env://"))[0]


def torchrun_rank_info() -> RankInfo | None:
    """Return the `RankInfo` of this process if torchrun started it, else None."""
    if not {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    return RankInfo(rank, size, local_rank, local_size)


class Group:
    """The connections of one rank: gloo for commands; for tensors, gloo on CPUs and NCCL on GPUs.

    They are independent of `torch.distributed.init_process_group`, which the user's program may call.
    """

    def __init__(
        self, device: torch.device, info: RankInfo, seconds: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for the other ranks and connect to them, within `START` seconds. `check` is called while
        waiting and may raise. Collectives raise RuntimeError after `seconds`.

        NCCL allocates its buffers here, so measure the free memory afterwards.
        """
        rank, size, store = info.rank, info.size, info.store()
        self.device, self.rank, self.size = device, rank, size
        self._closing = threading.Lock()
        timeout, deadline = timedelta(seconds=seconds), time.monotonic() + START

        def wait_until(ready: Callable[[], bool]) -> None:
            while not ready():
                check()
                if time.monotonic() > deadline:
                    raise ConnectionError(f"Not all of the {size} ranks started within {START} seconds.")
                time.sleep(0.02)

        store.add("nanospec/ranks", 1)
        wait_until(lambda: store.add("nanospec/ranks", 0) >= size)
        # gloo waits up to `timeout` for each rank in turn, and cannot be interrupted.
        connected, connect = Future[Any](), partial(_connect_gloo, info, store, timeout)
        threading.Thread(target=_fulfill, args=(connected, connect), daemon=True, name="connecting").start()
        wait_until(connected.done)
        self._gloo: Any = connected.result()
        self._tensors: Any = self._gloo
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            store = dist.PrefixStore("nanospec/nccl", store)
            self._tensors = dist.ProcessGroupNCCL(store, rank, size, options)
        self.all_to_all(self.all_gather(torch.zeros(1, device=device)))

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x [...], of equal shape and dtype on every rank, into [size, ...] in rank order."""
        out = x.new_empty(self.size, *x.shape)
        self._tensors._allgather_base(_bytes(out), _bytes(x.contiguous()), _GATHER).wait()
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send x[r] of x [size, ...] to each rank r. Return [size, ...], the received parts by sender."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._tensors.alltoall_base(_bytes(out), _bytes(x.contiguous()), [], [], _EXCHANGE).wait()
        return out

    def send(self, command: Any) -> None:
        """Send a command from the leader to all followers."""
        data = torch.frombuffer(bytearray(pickle.dumps(command)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def receive(self) -> Any:
        """Wait for the leader's next command. Raises RuntimeError if the connection is lost."""
        size = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        return pickle.loads(self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy().data)

    def broadcast_object(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` on the leader and return its result on all ranks."""
        if self.rank:
            return self.receive()
        value = compute()
        self.send(value)
        return value

    def _broadcast(self, x: Tensor) -> Tensor:
        self._gloo.broadcast([x], _RECEIVE if self.rank else _SEND).wait()
        return x

    def close(self) -> None:
        """Leave the group. Concurrent calls return after the first one has finished.

        The C++ groups are destroyed here, before the interpreter is finalized: their destructors release and
        reacquire the GIL, which aborts the process if the interpreter was finalized meanwhile.
        """
        with self._closing:
            tensors, self._tensors, self._gloo = self._tensors, None, None
            if tensors is not None and self.device.type == "cuda":
                # `abort` may hang if the GPUs of other ranks no longer respond.
                leaving = threading.Thread(target=tensors.abort, daemon=True, name="leaving")
                leaving.start()
                leaving.join(CLOSING)
                del leaving
            del tensors  # the last reference, dropped while holding the lock


def _connect_gloo(info: RankInfo, store: dist.Store, timeout: timedelta) -> Any:
    """Connect to the other ranks, which must do so at the same time."""
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack some of its attributes
    options: Any = timeout
    if info.path:
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timeout
    return gloo(dist.PrefixStore("nanospec/gloo", store), info.rank, info.size, options)


def _fulfill(result: Future[Any], compute: Callable[[], Any]) -> None:
    """Set the result to what `compute` returns or raises."""
    try:
        result.set_result(compute())
    except Exception as error:
        result.set_exception(error)


def _bytes(x: Tensor) -> Tensor:
    """Return a flat uint8 view, since gloo does not support every dtype."""
    return x.flatten().view(torch.uint8)
