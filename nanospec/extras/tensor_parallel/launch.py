"""Start the ranks: the leader starts the others as processes of its own, or torchrun has started all.

A follower that the leader starts does not run the user's program. The leader sends it the arguments of `LLM`
when they are connected; reading them imports the modules of drafters that the program has imported. Under
torchrun every process, on one machine or several, runs the program, and all but rank 0 stay in `LLM(...)`.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ...config import EngineConfig
from ...device.devices import current, resolve_device, use_threads
from ...drafters.methods import Guessers, load_parts, who_guesses
from ...models.families import read_config
from ...text import shown
from ...text.tokenizer import Tokenizer
from ..loading import wanted
from .group import Group
from .job import LOOK, Job, RankFailed, disconnect, report_failure
from .shard import Shard, check_split
from .worker import Rank, for_followers


class Parts(NamedTuple):
    """The arguments of `LLM` that every rank needs."""

    config: EngineConfig
    folder: Path
    drafter: Guessers | None


class Place(NamedTuple):
    """The place of a rank.

    Attributes:
        local, neighbours: its number among the ranks of its machine, and how many these are.
        path: the file in which ranks meet that the leader has started; torchrun has a store for it.
    """

    rank: int
    size: int
    local: int
    neighbours: int
    path: str = ""

    @property
    def gpu(self) -> int:
        """The number of the rank's GPU. A launcher may show each process its own alone."""
        return 0 if os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0 else self.local

    def store(self) -> dist.Store:
        if self.path:
            return dist.FileStore(self.path, self.size)
        found: dist.Store = next(dist.rendezvous("env://"))[0]
        return found


def torchrun_place() -> Place | None:
    """Return the place of this process if torchrun started it."""
    if not {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    rank, size, local, neighbours = (int(os.environ[name]) for name in names)
    return Place(rank, size, local, neighbours)


def lead(parts: Parts, tokenizer: Tokenizer) -> Rank:
    """Return the leader's worker of `config.tensor_parallel_size` ranks. In torchrun's other processes,
    follow the leader instead, and end the process with the job.

    Raises ValueError if the model cannot be split so, RankFailed if a rank does not start.
    """
    config, place = parts.config, torchrun_place()
    size = config.tensor_parallel_size
    check_split(read_config(parts.folder), size)
    _check_devices(config, size if place is None else place.gpu + 1)
    others = parts._replace(drafter=for_followers(parts.drafter))
    if place is None:
        _check_sendable(others)
        place, job = _start_followers(config)
    elif place.size != size:
        raise ValueError(
            f"torchrun has started {place.size} processes, but tensor_parallel_size={size}; use as many."
        )
    elif place.rank:
        raise SystemExit(serve(place, config, others))
    else:
        store = place.store()
        if store.add("nanospec/leaders", 1) > 1:
            raise ValueError("Under torchrun a program has one LLM, since the other ranks stay in its first.")
        job = Job((), store, config.distributed_timeout)
    try:
        with job.command("start", math.inf):
            job.group = _connect(place, config, job.check)
            if place.path:
                job.group.send(others)
            return _worker(parts, tokenizer, job.group, job)
    except BaseException as error:
        job.close()
        if isinstance(error, RankFailed) and isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from None  # of this rank, in the user's words
        raise


def _check_devices(config: EngineConfig, count: int) -> None:
    """Raise ValueError unless this machine has a device for each of so many ranks."""
    size = config.tensor_parallel_size
    if resolve_device(config.device).type != "cuda":
        return
    if ":" in str(config.device):
        raise ValueError(
            f"device={shown(config.device)} is one GPU, but tensor_parallel_size={size}; use device='cuda', "
            "and CUDA_VISIBLE_DEVICES to choose which."
        )
    if (there := torch.cuda.device_count()) < count:
        raise ValueError(
            f"tensor_parallel_size={size} needs {count} GPUs on this machine, which shows {there}; lower it, "
            "or use device='cpu'."
        )


def _check_sendable(parts: Parts) -> None:
    """Raise ValueError if followers could not make the drafter."""
    for each in who_guesses(parts.config.spec, parts.drafter):
        if type(each).__module__ == "__main__":
            raise ValueError(
                f"{type(each).__name__} is defined in the script, which other ranks do not run: define it in "
                "a module that the script imports."
            )
    try:
        pickle.dumps(parts)
    except Exception as error:
        raise ValueError(f"drafter={shown(parts.drafter)} cannot be sent to other ranks: {error}") from None


def _start_followers(config: EngineConfig) -> tuple[Place, Job]:
    """Start the ranks from 1 on as processes. They ignore Ctrl-C, which is the leader's, and look for modules
    where this process does."""
    path = [folder or os.getcwd() for folder in sys.path] + [str(Path(__file__).resolve().parents[3])]
    env = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
    env = {**os.environ, **env, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    command = [sys.executable, "-c", program + f"from {__name__} import begin; begin()"]
    size = config.tensor_parallel_size
    place, processes = Place(0, size, 0, size, mkdtemp(prefix="nanospec-") + "/store"), []
    for rank in range(1, size):
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        with suppress(BrokenPipeError), process.stdin as stdin:  # type: ignore[union-attr]
            pickle.dump((os.getpid(), place._replace(rank=rank, local=rank), config), stdin)
        processes.append(process)
    return place, Job(processes, place.store(), config.distributed_timeout, place.path)


def begin() -> NoReturn:
    """Run the process of a follower that the leader has started."""
    leader, place, config = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(leader, place), daemon=True, name="leader").start()
    status = serve(place, config)
    if os.getppid() != leader:
        _end_with(leader, place)
    sys.exit(status)


def _end_with(leader: int, place: Place) -> None:
    """End this process when the leader's has ended, whatever this one waits for."""
    while os.getppid() == leader:
        time.sleep(LOOK)
    shutil.rmtree(os.path.dirname(place.path), ignore_errors=True)  # for a leader that was killed
    os._exit(1)


def serve(place: Place, config: EngineConfig, parts: Parts | None = None) -> int:
    """Be a follower until the leader ends the job; return the exit status. The leader sends the `parts` that
    are not given."""
    store, group = place.store(), None
    try:
        group = _connect(place, config)
        parts = parts or group.receive()
        worker = _worker(parts, Tokenizer(parts.folder), group)
        worker.follow()
        disconnect(group, worker.graphs)
        return 0
    except Exception as error:
        report_failure(store, place.rank, error)
        return 1
    finally:
        if group is not None:
            group.close()


def _connect(place: Place, config: EngineConfig, check: Callable[[], None] = lambda: None) -> Group:
    """Prepare the rank's device, and connect it with the others."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", place.gpu)
        torch.cuda.set_device(device)
    else:  # a fixed number, since all ranks must have the same
        cores = len(os.sched_getaffinity(0))
        threads = max(cores // place.neighbours, 1) if config.threads == "auto" else config.threads
        if threads > cores:  # they would wait for each other awake
            raise ValueError(f"threads={threads} of each rank are more than {cores} processors; use fewer.")
        use_threads(threads)
    store, host = place.store(), "127.0.0.1" if place.path else ""
    return Group(device, place.rank, place.size, store, config.distributed_timeout, host, check)


def _worker(parts: Parts, tokenizer: Tokenizer, group: Group, job: Job | None = None) -> Rank:
    """Load the rank's part of the model, and make its worker."""
    config, split = parts.config, partial(Shard, group=group)
    with current(group.device):
        model, drafters = load_parts(config, parts.folder, parts.drafter, tokenizer, group.device, split)
    return Rank(config, model, drafters, group, wanted(config, tokenizer if job else None), job)
