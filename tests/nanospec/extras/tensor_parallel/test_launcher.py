"""Ranks as processes: outputs match a single process, and no rank survives the end of the leader."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.drafters import SimpleDrafter
from nanospec.extras.tensor_parallel import launcher
from nanospec.extras.tensor_parallel.process_group import RankFailed
from nanospec.llm import Prompt
from tests.tiny import checkpoint, tiny_tokenizer
from tests.util import eventually

ROOT = Path(__file__).parents[4]
PROMPTS: list[Prompt] = ["a red red green red red", "ab ab ab abab", [5, 9, 5, 9, 5], "ab red"]
GRAMMAR = {"type": "regex", "regex": "(ab|red)+"}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, stop=["q"]),
    SamplingParams(temperature=0.9, seed=4, top_p=0.8, max_tokens=20, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, response_format=GRAMMAR),
]


def random_model(folder: Path) -> Path:
    """Write a random checkpoint with a tokenizer to the folder and return it."""
    folder.mkdir(exist_ok=True)
    return checkpoint(folder, "llama", vocab_size=tiny_tokenizer(folder).vocab_size, eos_token_id=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return make(folder, 1)


def make(folder: Path, size: int, **options: Any) -> LLM:
    spec = SpecConfig(num_speculative_tokens=4)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "threads": 1, **options}
    return LLM(folder, spec=spec, device="cpu", tensor_parallel_size=size, **options)


def generate(llm: LLM) -> list[Any]:
    return [(output.text, output.token_ids) for output in llm.generate(PROMPTS, PARAMS)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: Sequence[int]) -> None:
    eventually(lambda: not any(map(is_alive, pids)))


def children() -> list[int]:
    """Return the followers of this process."""
    return [process.pid for process in launcher.get_context("spawn").active_children() if process.pid]


class Unequal(SimpleDrafter):
    """A drafter that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("for one process",)


@pytest.mark.slow
def test_start_failures_are_reported(folder: Path) -> None:
    for size, options, error in (
        (3, {}, "^tensor_parallel_size=3 cannot split 4 attention heads"),
        (2, {"kv_cache_memory": 99}, "^kv_cache_memory of 99 bytes hold"),
        (2, {"drafter": Unequal()}, "^A rank could not start; see its error above"),
    ):
        with pytest.raises((ValueError, RankFailed), match=error):
            make(folder, size, **options)
        assert children() == []


def test_torchrun_allows_one_llm_of_all_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    for name, value in zip(names, (0, 8, 0, 16, 7)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=r"torchrun started 16 processes, not tensor_parallel_size=2\."):
        make(folder, 2)
    store = HashStore()
    store.add("nanospec/started", 2)  # ranks of the first LLM
    monkeypatch.setattr(launcher, "rendezvous", lambda address: iter([(store, 0, 2)]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Under torchrun, only one LLM can be created"):
        make(folder, 2)


def test_ranks_on_a_machine_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[object] = []
    monkeypatch.setattr(launcher, "use_threads", threads.append)
    monkeypatch.setattr(launcher, "ProcessGroup", lambda *given: [][0])
    monkeypatch.setattr(launcher, "resolve_device", torch.device)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def load(size: int, device: str = "cpu", **options: Any) -> None:
        config = EngineConfig(device=device, tensor_parallel_size=size, **options)
        unused: Any = None
        launcher._load(0, HashStore(), (config, Path(), None), unused, unused)

    for size in (8, 7, 40):
        with pytest.raises(IndexError):
            load(size)
    with pytest.raises(IndexError):
        load(2, threads=32)
    assert threads == [4, 4, 1, 32]
    for size, device in ((4, "cuda"), (2, "cuda:1")):
        with pytest.raises(ValueError, match=f"={size} needs {size} GPUs, but device='{device}' has fewer"):
            load(size, device)


@pytest.mark.slow
def test_output_interrupts_and_hanging_rank(folder: Path, whole: LLM) -> None:
    expected, llm = generate(whole), make(folder, 2)
    worker: Any = llm.engine.worker
    [rank] = children()
    assert generate(llm) == expected
    assert llm.engine.metrics.spec.num_accepted > 0
    fetch, fetches = worker.fetch, itertools.count(1)

    def interrupted(pending: Any) -> Any:
        at = next(fetches)
        if at == 4:
            signal.raise_signal(signal.SIGINT)
        if at == 8:
            raise KeyboardInterrupt  # between commands
        return fetch(pending)

    worker.fetch = interrupted
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    assert generate(llm) == expected
    worker.group._backends["cpu"]._set_default_timeout(timedelta(seconds=1))
    threading.Timer(0.2, os.kill, (rank, signal.SIGSTOP)).start()
    begun = time.monotonic()
    for repeats in (10_000, 1):
        with pytest.raises(RankFailed, match="A rank died, or did not answer within distributed_timeout=300"):
            [generate(llm) for _ in range(repeats)]
    assert time.monotonic() - begun < 20
    assert not is_alive(rank)
    assert not llm.engine.has_work
    llm.close()


@pytest.mark.slow
def test_output_under_torchrun_matches_one_process(folder: Path, whole: LLM, tmp_path: Path) -> None:
    [expected] = whole.generate("a red red", SamplingParams(temperature=0, max_tokens=30))
    arguments = f"{ROOT}/run.py --prompt 'a red red' --max-tokens 30 --temperature 0 --json"
    arguments += " --tensor-parallel-size 2 --max-model-len 128 --device cpu --dtype float32"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 --redirects=3 --log-dir"
    command = [*torchrun.split(), str(tmp_path), *shlex.split(arguments), "--model", str(folder)]
    subprocess.run([sys.executable, *command], check=True, timeout=100)
    leader, other = (next(tmp_path.rglob(f"{rank}/stdout.log")).read_text() for rank in (0, 1))
    result = json.loads(leader)
    assert result["outputs"][0]["token_ids"] == expected.token_ids
    assert len(result["metrics"]["memory"]) == 2
    assert other == ""


SCRIPT = """
import json, multiprocessing, os, random, signal, sys
from nanospec import LLM, SamplingParams, SimpleDrafter, SpecConfig

class RandomDrafter(SimpleDrafter):
    def draft(self, tokens, k):
        return random.choices(tokens, k=random.randint(0, k))

if __name__ == "__main__":
    sampling = [SamplingParams(max_tokens=30, seed=3, temperature=t) for t in (0, 0.9)]
    spec = SpecConfig(num_speculative_tokens=4)
    options = {"device": "cpu", "threads": 1, "dtype": "float32", "max_model_len": 128, "spec": spec}
    llm = LLM(sys.argv[1], drafter=["ngram", RandomDrafter()], tensor_parallel_size=2, **options)
    outputs = [output.token_ids for output in llm.generate([[5, 9, 5, 9], [8, 3, 8, 3]], sampling)]
    ranks = [process.pid for process in multiprocessing.active_children()]
    result = {"outputs": outputs, "accepted": llm.engine.metrics.spec.num_accepted, "ranks": ranks}
    print(json.dumps(result), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_script_with_own_drafter_leaves_no_ranks(folder: Path, whole: LLM, tmp_path: Path) -> None:
    """The script defines a random drafter, and is killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    result = json.loads(done.stdout)
    sampling = [SamplingParams(max_tokens=30, seed=3, temperature=t) for t in (0, 0.9)]
    outputs = whole.generate([[5, 9, 5, 9], [8, 3, 8, 3]], sampling)
    assert result["outputs"] == [output.token_ids for output in outputs]
    assert result["accepted"] > 0
    assert len(result["ranks"]) == 1
    assert_gone(result["ranks"])
