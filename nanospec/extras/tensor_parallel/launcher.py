"""Start the ranks. The leader spawns the followers on its machine, unless torchrun has started all ranks, on
one or several machines. Under torchrun, all ranks but 0 stay in `LLM(...)` until the leader ends."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed import FileStore, Store, rendezvous

from ...config import EngineConfig
from ...device.hardware import resolve_device, use_device, use_threads
from ...drafters.methods import Drafters, load_model_and_drafters
from ...models.families import read_config
from ...text.tokenizer import Tokenizer
from .. import create_extensions
from .process_group import ProcessGroup, RankFailed
from .shard import Shard, check_split
from .worker import RankWorker

STARTED = "nanospec/started"  # the store's key for the number of ranks that have started
POLL = 0.1  # seconds between two checks of the followers

Arguments = tuple[EngineConfig, Path, Drafters | None]
"""The arguments of `LLM` that every rank needs: the config, the checkpoint and the drafter."""


def lead(config: EngineConfig, folder: Path, drafter: Drafters | None, tokenizer: Tokenizer) -> RankWorker:
    """Start `config.tensor_parallel_size` ranks and return the leader's worker. In torchrun's other
    processes, follow the leader and exit.

    Raises ValueError if the model cannot be split among the ranks, RankFailed if a rank does not start.
    """
    arguments, size, processes = (config, folder, drafter), config.tensor_parallel_size, list[Any]()
    check_split(read_config(folder)[1], size)
    with ExitStack() as stack:
        if under_torchrun():
            rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            if started != size:
                raise ValueError(f"torchrun started {started} processes, not tensor_parallel_size={size}.")
            store = next(rendezvous("env://"))[0]
            if rank:
                follow(rank, store, arguments)
                sys.exit()
        else:
            path = stack.enter_context(TemporaryDirectory(prefix="nanospec-")) + "/store"  # of this user only
            store = FileStore(path, size)
            for rank in range(1, size):
                args = rank, path, arguments
                processes.append(get_context("spawn").Process(target=run_follower, args=args, daemon=True))
                processes[-1].start()
                stack.callback(processes[-1].join)
                stack.callback(processes[-1].kill)
        while (started := store.add(STARTED, 0)) < size - 1:
            if any(process.exitcode is not None for process in processes):
                raise RankFailed("A rank could not start; see its error above.")
            time.sleep(POLL)
        if started == size:
            raise ValueError("Under torchrun, only one LLM can be created: other ranks serve the first one.")
        worker = _load(0, store, arguments, tokenizer, stack)
        worker.end = weakref.finalize(worker, stack.pop_all().close)
    return worker


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_follower(rank: int, path: str, arguments: Arguments) -> None:
    """Run a follower in a process that the leader has spawned, and which ends with the leader's process."""

    def exit_with_leader() -> None:
        parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    os.setsid()  # Ctrl-C in a terminal is for the leader only
    threading.Thread(target=exit_with_leader, daemon=True).start()
    try:
        follow(rank, FileStore(path, arguments[0].tensor_parallel_size), arguments)
    except (ValueError, OSError, MemoryError) as error:
        sys.exit(f"Rank {rank} failed: {error}")


def follow(rank: int, store: Store, arguments: Arguments) -> None:
    """Run the leader's commands until it leaves the group."""
    with ExitStack() as stack, suppress(RankFailed):
        _load(rank, store, arguments, Tokenizer(arguments[1]), stack).follow()


def _load(
    rank: int, store: Store, arguments: Arguments, tokenizer: Tokenizer, stack: ExitStack
) -> RankWorker:
    """Connect to the other ranks, load the rank's shard of the model and return its worker. Closing the
    `stack` disconnects it."""
    config, device = arguments[0], resolve_device(arguments[0].device)
    index, count = rank, config.tensor_parallel_size  # of the rank on its machine
    if under_torchrun():
        index, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cuda":
        if count > torch.cuda.device_count() or ":" in config.device:
            raise ValueError(
                f"tensor_parallel_size={count} needs {count} GPUs, but device={config.device!r} has fewer."
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    else:  # a fixed number, because all ranks must use the same
        share = max(len(os.sched_getaffinity(0)) // count, 1)
        use_threads(share if config.threads == "auto" else config.threads)
    store.add(STARTED, 1)
    group = ProcessGroup(rank, config.tensor_parallel_size, store, device, config.distributed_timeout)
    stack.callback(group.close)
    with use_device(device):
        model, drafters = load_model_and_drafters(*arguments, tokenizer, device, partial(Shard, group=group))
    worker = RankWorker(group, config, model, drafters, create_extensions(config, tokenizer))
    if worker.graphs is not None:  # cleared first, because NCCL waits for its kernels in them
        stack.callback(worker.graphs.captures.clear)
    return worker
