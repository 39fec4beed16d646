"""Start the ranks: the leader starts the others as processes of its own, or torchrun has started all.

A follower that the leader starts does not run the user's program, which therefore needs no
`if __name__ == "__main__"`. It finds the arguments of `LLM` in the store; unpickling them imports the modules
of the user's drafters. Under torchrun every process, on one machine or several, runs the program, and all but
rank 0 stay in `LLM(...)`.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import mkdtemp
from typing import NoReturn

import torch

from ...config import EngineConfig
from ...device.resources import current, resolve_device, use_threads
from ...drafters.methods import Drafters, load_parts, resolve_drafters
from ...models.families import read_config
from ...text import shown
from ...text.tokenizer import Tokenizer
from .. import create_extensions
from .group import Group, Place, torchrun_place
from .job import POLL, Job, RankFailed, report_failure
from .shard import Shard, check_split
from .worker import Rank, for_followers

ARGUMENTS = "nanospec/arguments"  # the key in the store of the followers' `Arguments`, pickled

Arguments = tuple[EngineConfig, Path, Drafters | None]
"""Those of `LLM` that every rank needs: settings, the folder of the model, the drafter."""


def lead(config: EngineConfig, folder: Path, drafter: Drafters | None, tokenizer: Tokenizer) -> Rank:
    """Return the leader's worker of `config.tensor_parallel_size` ranks. In torchrun's other processes,
    follow the leader instead, and end the process with the job.

    Raises ValueError if the model cannot be split so, RankFailed if a rank does not start.
    """
    size, place = config.tensor_parallel_size, torchrun_place()
    check_split(read_config(folder)[1], size)
    _check_devices(config, size if place is None else place.gpu + 1)
    for_others = config, folder, for_followers(drafter)
    if place is None:
        pickled = _pickled(for_others)
        place = Place(0, size, 0, size, mkdtemp(prefix="nanospec-") + "/store")
    elif place.size != size:
        raise ValueError(
            f"torchrun has started {place.size} processes, but tensor_parallel_size={size}; use as many."
        )
    elif place.rank:
        raise SystemExit(follow(place, for_others))
    store = place.store()
    if store.add("nanospec/leaders", 1) > 1:
        raise ValueError("Under torchrun a program has one LLM, since the other ranks stay in its first.")
    job = Job([], store, config.distributed_timeout, place.path)
    try:
        with job.command("start", math.inf):
            if place.path:
                store.set(ARGUMENTS, pickled)  # type: ignore[arg-type]
                _start_followers(place, job.processes)
            job.group = _connect(place, config, job.check)
            return _worker((config, folder, drafter), tokenizer, job.group, job)
    except BaseException as error:
        job.close()
        if isinstance(error, RankFailed) and isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from None  # of this rank, in the user's words
        raise


def _check_devices(config: EngineConfig, count: int) -> None:
    """Raise ValueError unless this machine has `count` GPUs, if ranks use GPUs."""
    size = config.tensor_parallel_size
    if resolve_device(config.device).type != "cuda":
        return
    if ":" in str(config.device):
        raise ValueError(
            f"device={shown(config.device)} is one GPU, but tensor_parallel_size={size}; use device='cuda', "
            "and CUDA_VISIBLE_DEVICES to choose which."
        )
    if (available := torch.cuda.device_count()) < count:
        raise ValueError(
            f"tensor_parallel_size={size} needs {count} GPUs on this machine, which shows {available}; lower "
            "it, or use device='cpu'."
        )


def _pickled(arguments: Arguments) -> bytes:
    """Pickle the arguments of followers. Raises ValueError for a drafter that these could not load."""
    config, _, given = arguments
    for drafter in resolve_drafters(config.spec, given):
        if type(drafter).__module__ == "__main__":
            raise ValueError(
                f"{type(drafter).__name__} is defined in the script, which other ranks do not run: define it "
                "in a module that the script imports."
            )
    try:
        return pickle.dumps(arguments)
    except Exception as error:
        raise ValueError(f"drafter={shown(given)} cannot be sent to other ranks: {error}") from None


def _start_followers(leader: Place, processes: list[Popen[bytes]]) -> None:
    """Start the ranks from 1 on as processes. They ignore Ctrl-C, which is the leader's, and look for modules
    where this process does."""
    path = [folder or os.getcwd() for folder in sys.path] + [str(Path(__file__).resolve().parents[3])]
    env = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
    env = {**os.environ, **env, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for rank in range(1, leader.size):
        program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        program += f"from {__name__} import Place, run_follower; "
        program += f"run_follower({os.getpid()}, {leader._replace(rank=rank, local_rank=rank)})"
        command = [sys.executable, "-c", program]
        processes.append(Popen(command, env=env, stdin=DEVNULL, stdout=2, start_new_session=True))


def run_follower(leader: int, place: Place) -> NoReturn:
    """Run a follower process that the leader has started. It exits when the leader's process has ended, even
    while it is blocked."""

    def watch() -> None:
        while os.getppid() == leader:
            time.sleep(POLL)
        shutil.rmtree(os.path.dirname(place.path), ignore_errors=True)  # for a leader that was killed
        os._exit(1)

    thread = threading.Thread(target=watch, daemon=True, name="leader")
    thread.start()
    if follow(place):
        thread.join()  # the leader, which knows why, ends this process
    sys.exit()


def follow(place: Place, arguments: Arguments | None = None) -> int:
    """Run the leader's commands until it ends the job; return the exit status. Without `arguments`, those in
    the store are used."""
    store, group = place.store(), None
    try:
        arguments = arguments or pickle.loads(store.get(ARGUMENTS))
        group = _connect(place, arguments[0])
        _worker(arguments, Tokenizer(arguments[1]), group).follow()
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
        threads = max(cores // place.local_size, 1) if config.threads == "auto" else config.threads
        if threads > cores:  # ranks that wait for each other keep theirs busy
            raise ValueError(f"threads={threads} of each rank are more than {cores} processors; use fewer.")
        use_threads(threads)
    return Group(device, place, config.distributed_timeout, check)


def _worker(arguments: Arguments, tokenizer: Tokenizer, group: Group, job: Job | None = None) -> Rank:
    """Load the rank's part of the model, and make its worker."""
    config, split = arguments[0], partial(Shard, group=group)
    with current(group.device):
        model, drafters = load_parts(*arguments, tokenizer, group.device, split)
    extensions = create_extensions(config, tokenizer if job else None)
    return Rank(group, job, config, model, drafters, extensions)
