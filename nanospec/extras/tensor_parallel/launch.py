"""Start the ranks. The leader starts the followers as child processes, unless torchrun has started all ranks.

Followers that the leader starts do not run the user's program, which therefore needs no
`if __name__ == "__main__"` guard. They read the arguments of `LLM` from the store; unpickling these imports
the modules of the user's drafters. Under torchrun, every process on every machine runs the program, and all
ranks but 0 stay in `LLM(...)` until the job ends.
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
from ...device.resources import resolve_device, use_device, use_threads
from ...drafters.methods import Drafters, load_model_and_drafters, resolve_drafters
from ...models.families import read_config
from ...text.tokenizer import Tokenizer
from ...text.validation import shown
from .. import create_extensions
from .group import Group, RankInfo, torchrun_rank_info
from .job import POLL, Job, RankFailed, report_failure
from .shard import Shard, check_split
from .worker import Rank, for_followers

ARGUMENTS = "nanospec/arguments"  # the store's key for the followers' `Arguments`, pickled

Arguments = tuple[EngineConfig, Path, Drafters | None]
"""The arguments of `LLM` that every rank needs: the config, the checkpoint and the drafter."""


def lead(config: EngineConfig, folder: Path, drafter: Drafters | None, tokenizer: Tokenizer) -> Rank:
    """Start `config.tensor_parallel_size` ranks and return the leader's worker. In torchrun's other
    processes, follow the leader and exit when the job ends.

    Raises ValueError if the model cannot be split among the ranks, RankFailed if a rank does not start.
    """
    size, info = config.tensor_parallel_size, torchrun_rank_info()
    check_split(read_config(folder)[1], size)
    _check_devices(config, size if info is None else info.gpu + 1)
    for_others = config, folder, for_followers(drafter)
    if info is None:
        pickled = _pickled(for_others)
        info = RankInfo(0, size, 0, size, mkdtemp(prefix="nanospec-") + "/store")
    elif info.size != size:
        raise ValueError(
            f"torchrun started {info.size} processes, but tensor_parallel_size={size}; they must be equal."
        )
    elif info.rank:
        raise SystemExit(follow(info, for_others))
    store = info.store()
    if store.add("nanospec/leaders", 1) > 1:
        raise ValueError("Only one LLM can be created under torchrun: the other ranks serve the first one.")
    job = Job([], store, config.distributed_timeout, info.path)
    try:
        with job.command("start", math.inf):
            if info.path:
                store.set(ARGUMENTS, pickled)  # type: ignore[arg-type]
                _start_followers(info, job.processes)
            job.group = _connect(info, config, job.check)
            return _worker((config, folder, drafter), tokenizer, job.group, job)
    except BaseException as error:
        job.close()
        if isinstance(error, RankFailed) and isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from None  # the user's error on this rank, without the job's message
        raise


def _check_devices(config: EngineConfig, count: int) -> None:
    """Raise ValueError if the ranks use GPUs and this machine has fewer than `count`."""
    size = config.tensor_parallel_size
    if resolve_device(config.device).type != "cuda":
        return
    if ":" in str(config.device):
        raise ValueError(
            f"device={shown(config.device)} is a single GPU, but tensor_parallel_size={size}; use "
            "device='cuda' and select GPUs with CUDA_VISIBLE_DEVICES."
        )
    if (available := torch.cuda.device_count()) < count:
        raise ValueError(
            f"tensor_parallel_size={size} needs {count} GPUs on this machine, but {available} are available; "
            "lower it or use device='cpu'."
        )


def _pickled(arguments: Arguments) -> bytes:
    """Pickle the followers' arguments. Raises ValueError for a drafter that they could not load."""
    config, _, drafters = arguments
    for drafter in resolve_drafters(config.spec, drafters):
        if type(drafter).__module__ == "__main__":
            raise ValueError(
                f"{type(drafter).__name__} is defined in the main script, which other ranks do not run; move "
                "it to a module that the script imports."
            )
    try:
        return pickle.dumps(arguments)
    except Exception as error:
        raise ValueError(f"drafter={shown(drafters)} cannot be sent to other ranks: {error}") from None


def _start_followers(leader: RankInfo, processes: list[Popen[bytes]]) -> None:
    """Start ranks 1 and up as child processes. They ignore SIGINT, which the leader handles, and have
    the leader's module search path."""
    path = [folder or os.getcwd() for folder in sys.path] + [str(Path(__file__).resolve().parents[3])]
    env = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
    env = {**os.environ, **env, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for rank in range(1, leader.size):
        program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        program += f"from {__name__} import RankInfo, run_follower; "
        program += f"run_follower({os.getpid()}, {leader._replace(rank=rank, local_rank=rank)})"
        command = [sys.executable, "-c", program]
        processes.append(Popen(command, env=env, stdin=DEVNULL, stdout=2, start_new_session=True))


def run_follower(leader: int, info: RankInfo) -> NoReturn:
    """Run a follower process that the leader has started. It exits when the leader's process ends, even if
    it is blocked at the time."""

    def watch() -> None:
        while os.getppid() == leader:
            time.sleep(POLL)
        shutil.rmtree(os.path.dirname(info.path), ignore_errors=True)  # a killed leader left it behind
        os._exit(1)

    thread = threading.Thread(target=watch, daemon=True, name="leader")
    thread.start()
    if follow(info):
        thread.join()  # wait until the leader, which has the error, kills this process
    sys.exit()


def follow(info: RankInfo, arguments: Arguments | None = None) -> int:
    """Run the leader's commands until the job ends, and return the exit status. `arguments` default to those
    in the store."""
    store, group = info.store(), None
    try:
        arguments = arguments or pickle.loads(store.get(ARGUMENTS))
        group = _connect(info, arguments[0])
        _worker(arguments, Tokenizer(arguments[1]), group).follow()
        return 0
    except Exception as error:
        report_failure(store, info.rank, error)
        return 1
    finally:
        if group is not None:
            group.close()


def _connect(info: RankInfo, config: EngineConfig, check: Callable[[], None] = lambda: None) -> Group:
    """Set up the rank's device and connect it to the other ranks."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", info.gpu)
        torch.cuda.set_device(device)
    else:  # a fixed number, because all ranks must use the same
        cores = len(os.sched_getaffinity(0))
        threads = max(cores // info.local_size, 1) if config.threads == "auto" else config.threads
        if threads > cores:  # threads of ranks that wait for each other keep their cores busy
            raise ValueError(f"threads={threads} per rank exceeds the {cores} available cores; lower it.")
        use_threads(threads)
    return Group(device, info, config.distributed_timeout, check)


def _worker(arguments: Arguments, tokenizer: Tokenizer, group: Group, job: Job | None = None) -> Rank:
    """Load the rank's shard of the model and return its worker."""
    config, split = arguments[0], partial(Shard, group=group)
    with use_device(group.device):
        model, drafters = load_model_and_drafters(*arguments, tokenizer, group.device, split)
    extensions = create_extensions(config, tokenizer if job else None)
    return Rank(group, job, config, model, drafters, extensions)
