"""How ranks come about: the leader starts them, or `torchrun` has started all of them.

Started here, a rank is `python -m nanospec.extras.tensor_parallel.rank`, told by its environment where
the leader is. Under torchrun every process runs the user's program, and all but rank 0 stay in `LLM(...)`
until that is done.
There ranks may be on several machines.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store

from ...config import EngineConfig
from ...device.devices import current, resolve_device
from ...device.threads import use_threads
from ...drafters.base import Drafter
from ...drafters.base import registered as methods
from ...drafters.loading import Guessers, load_parts, who_guesses
from ...models.config import ModelConfig
from ...models.decoder import Model
from ...text.checks import shown
from ...text.tokenizer import Tokenizer
from .. import wanted
from .group import Processes
from .guesses import for_others
from .meeting import ADDRESS, READY, Meeting, hand_over, messages_of, new_key, visit
from .ranks import Leader, Rank, follow, part
from .shard import check_split
from .team import RankFailed, Team, is_asked_for, told

VARIABLE = "NANOSPEC_RANK"  # of a rank's environment: its `Place` as JSON
START = 300  # seconds within which all ranks must be there


class Place(NamedTuple):
    """Where a rank belongs.

    Attributes:
        local, neighbours: its number on its machine, which is that of its GPU, and how many ranks are there.
        host, port: of the store where ranks meet.
        key: what they know each other by, if it is not in the store.
        leader: the process of the leader, if it has started this one.
    """

    rank: int
    size: int
    local: int
    neighbours: int
    host: str
    port: int
    key: str = ""
    leader: int = 0

    def store(self) -> Store:
        """The store. Under torchrun it is torchrun's, whoever keeps that."""
        if torchrun_place() is not None:
            found: Store = next(dist.rendezvous("env://"))[0]
            return found
        return dist.TCPStore(self.host, self.port, is_master=False)


class Parts(NamedTuple):
    """What a rank is made of.

    Attributes:
        modules: what the user's program has imported that adds drafters.
    """

    config: EngineConfig
    folder: Path
    drafter: Guessers | None
    modules: tuple[str, ...] = ()


def torchrun_place() -> Place | None:
    """This process's, if torchrun started it."""
    env = os.environ
    if not {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= env.keys():
        return None
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    rank, size, local, neighbours = (int(env[name]) for name in names)
    return Place(rank, size, local, neighbours, env["MASTER_ADDR"], int(env["MASTER_PORT"]))


def lead(parts: Parts, tokenizer: Tokenizer) -> Leader:
    """The leader of `config.tensor_parallel_size` ranks, which are started here unless torchrun did. Under
    torchrun all other ranks serve it, and then end their process.

    Raises ValueError if the model cannot be split so, RankFailed if a rank does not start.
    """
    size, place = parts.config.tensor_parallel_size, torchrun_place()
    check_split(ModelConfig.from_path(parts.folder), size)
    _check_devices(parts.config, size if place is None else gpu_of(place) + 1)
    if place is None:
        return _lead_started(parts, tokenizer)
    if place.size != size:
        raise ValueError(
            f"torchrun has started {place.size} processes, but tensor_parallel_size={size}; use as many."
        )
    if place.rank:
        raise SystemExit(serve(place))
    if (store := place.store()).check([ADDRESS]):
        raise ValueError("Under torchrun a program has one LLM, since the other ranks stay in its first.")
    return _lead(parts, tokenizer, place, store, [])


def _modules(parts: Parts) -> tuple[str, ...]:
    """Those that add drafters. ValueError if other ranks could not make a drafter."""
    given = for_others(parts.drafter)
    for who in who_guesses(parts.config.spec, given):
        kind = methods()[who].drafter if isinstance(who, str) else type(who)
        if kind.__module__ == "__main__":
            raise ValueError(
                f"{kind.__name__} is defined in the script, which other ranks do not run: define it in a "
                "module that the script imports."
            )
    try:
        pickle.dumps(given)
    except Exception as error:
        raise ValueError(f"drafter={shown(given)} cannot be sent to the other ranks: {error}") from None
    modules = {method.drafter.__module__ for method in methods().values()} - {"__main__"}
    return tuple(sorted(name for name in modules if not name.startswith("nanospec.")))


def _check_devices(config: EngineConfig, count: int) -> None:
    """ValueError unless this machine has a device for each of so many ranks."""
    if resolve_device(config.device).type != "cuda":
        return
    if ":" in str(config.device):
        raise ValueError(
            f"device={shown(config.device)} is one GPU, but tensor_parallel_size="
            f"{config.tensor_parallel_size}; use device='cuda', and CUDA_VISIBLE_DEVICES to choose which."
        )
    if (there := torch.cuda.device_count()) < count:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} needs {count} GPUs on this machine, which "
            f"shows {there}; lower it, or use device='cpu'."
        )


def _lead_started(parts: Parts, tokenizer: Tokenizer) -> Leader:
    """Start the other ranks. They do not run the user's script, but import what it has imported."""
    parts = parts._replace(modules=_modules(parts))
    size = parts.config.tensor_parallel_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(0, size, 0, size, "127.0.0.1", store.port, new_key(), os.getpid())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i in range(1, size):
            processes.append(_start(place._replace(rank=i, local=i)))
        return _lead(parts, tokenizer, place, store, processes)
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise


def _start(place: Place) -> subprocess.Popen[bytes]:
    """The process of a rank. In a session of its own, so that Ctrl-C is the leader's; modules are looked for
    where this process does."""
    here = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join(folder or os.getcwd() for folder in (*sys.path, here))
    own = {VARIABLE: json.dumps(place), "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
    own["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    return subprocess.Popen(
        [sys.executable, "-m", "nanospec.extras.tensor_parallel.rank"],
        env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
    )  # fmt: skip


def _lead(
    parts: Parts,
    tokenizer: Tokenizer,
    place: Place,
    store: Store,
    processes: Sequence[subprocess.Popen[bytes]],
) -> Leader:
    meeting = Meeting(place.host, store, place.key, place.neighbours < place.size)
    connections = meeting.await_ranks(place.size - 1, processes, START)
    others = parts._replace(drafter=for_others(parts.drafter))
    hand_over(connections, others, START)
    team = Team(connections, processes, parts.config.distributed_timeout)
    group = None
    try:
        with team.together():
            device = _device(place, parts.config)
            group = Processes(device, 0, place.size, store, parts.config.distributed_timeout)
            target, drafters = _load(parts, tokenizer, group)
        return Leader(parts.config, target, drafters, group, team, wanted(parts.config, tokenizer))
    except RankFailed as error:
        team.close()
        if group is not None:
            group.close()
        if isinstance(error.__cause__, ValueError | OSError):  # of this rank, in the user's words
            raise error.__cause__ from None
        raise


def serve(place: Place) -> int:
    """Be a rank until the leader is done; the exit status."""
    store = place.store()
    connection = visit(store, place.rank, place.key)
    try:
        parts = connection.recv()
        for name in parts.modules:
            import_module(name)
        device = _device(place, parts.config)
        connection.send((READY, None))
        messages = messages_of(connection)
        group = Processes(device, place.rank, place.size, store, parts.config.distributed_timeout)
        target, drafters = _load(parts, Tokenizer(parts.folder), group)
        rank = Rank(parts.config, target, drafters, group, wanted(parts.config))
        follow(rank, messages)
    except Exception as error:
        connection.send((told(error), is_asked_for(error)))
        return 1
    part(group, rank.graphs)
    return 0


def _device(place: Place, config: EngineConfig) -> torch.device:
    """The rank's device, made ready."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", gpu_of(place))
        torch.cuda.set_device(device)
    else:  # no number adapts to what else runs, since all ranks must have the same
        cores = len(os.sched_getaffinity(0))
        threads = max(cores // place.neighbours, 1) if config.threads == "auto" else config.threads
        if threads > cores:  # they would wait for each other awake
            raise ValueError(f"threads={threads} of each rank are more than {cores} processors; use fewer.")
        use_threads(threads)
    return device


def gpu_of(place: Place) -> int:
    """The number of the rank's GPU. A launcher may show each process its own alone."""
    return 0 if os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0 else place.local


def _load(parts: Parts, tokenizer: Tokenizer, group: Processes) -> tuple[Model, tuple[Drafter, ...]]:
    with current(group.device):
        return load_parts(parts.config, parts.folder, parts.drafter, tokenizer, group.device, group)
