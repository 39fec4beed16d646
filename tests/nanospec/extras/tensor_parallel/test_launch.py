"""Ranks as processes: outputs match a single process, and no rank survives the end of the job."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.drafters import SimpleDrafter
from nanospec.extras.tensor_parallel import job as job_module
from nanospec.extras.tensor_parallel import launch
from nanospec.extras.tensor_parallel.group import RankInfo, torchrun_rank_info
from nanospec.extras.tensor_parallel.job import RankFailed
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
PLACE = RankInfo(11, 16, 3, 8)  # the 12th of 16 processes, on the second of two machines


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


class Unequal(SimpleDrafter):
    """A drafter that cannot be unpickled."""

    reads_on_host = False

    def __reduce__(self) -> Any:
        return int, ("for one process",)


@pytest.mark.slow
def test_start_failures_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank runs in a thread."""
    make_worker, pool, followers = launch._worker, ThreadPoolExecutor(), list[Future[int]]()

    def slowly(arguments: Any, tokenizer: Any, group: Any, job: Any = None) -> Any:
        time.sleep(0.5 if job else 0)  # so that the other rank fails first
        return make_worker(arguments, tokenizer, group, job)

    def start_thread(leader: RankInfo, processes: Any) -> None:
        other = leader._replace(rank=1, local_rank=1)
        followers.append(pool.submit(launch.follow, other))

    monkeypatch.setattr(launch, "_worker", slowly)
    monkeypatch.setattr(launch, "_start_followers", start_thread)
    monkeypatch.setattr(job_module, "GRACE", 0.2)  # a leader loading weights may exceed it
    unnamed = type("Custom", (SimpleDrafter,), {"reads_on_host": False})()
    in_script = type("Custom", (type(unnamed),), {"__module__": "__main__"})()
    for size, options, error in (
        (3, {}, "^tensor_parallel_size=3 cannot split 4 attention heads"),
        (2, {"drafter": in_script}, "^Custom is defined in the main script, which other ranks do not run"),
        (2, {"drafter": unnamed}, "^drafter=.* cannot be sent to other ranks: Can't pickle"),
        (2, {"kv_cache_memory": 99}, "^kv_cache_memory of 99 bytes hold"),
        (2, {"drafter": Unequal()}, "^Rank 1 failed, so all ranks were stopped: .*for one process"),
    ):
        with pytest.raises((ValueError, RankFailed), match=error):
            make(folder, size, **options)
    assert [follower.result(20) for follower in followers] == [1, 1]


@pytest.mark.slow
def test_started_ranks_end_if_others_cannot_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    given: dict[str, Any] = {}

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        given.update(options, program=command[-1])
        started.append(subprocess.Popen(["sleep", "100"]))
        return started[0]

    monkeypatch.setattr(launch, "Popen", popen)
    with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
        make(folder, 4)
    assert started[0].returncode == -signal.SIGKILL
    place = r"rank=1, size=4, local_rank=1, local_size=4, path='(.*)/store'"
    [store] = re.findall(rf"run_follower\({os.getpid()}, RankInfo\({place}\)\)", given["program"])
    assert not Path(store).exists()
    assert given["start_new_session"]
    assert given["env"]["PYTHONSAFEPATH"] == "1"
    path = [folder or os.getcwd() for folder in sys.path]
    assert given["env"]["PYTHONPATH"].split(os.pathsep) == [*path, str(ROOT)]


def test_torchrun_allows_one_llm_of_all_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    for name, value in zip(names, (3, 8, 11, 16, 7)):
        assert torchrun_rank_info() is None
        monkeypatch.setenv(name, str(value))
    assert torchrun_rank_info() == PLACE
    with pytest.raises(ValueError, match=r"torchrun started 16 processes, but tensor_parallel_size=2;"):
        make(folder, 2)
    store = HashStore()
    store.add("nanospec/leaders", 1)
    monkeypatch.setattr(RankInfo, "store", lambda self: store)
    monkeypatch.setattr(launch, "torchrun_rank_info", lambda: RankInfo(0, 2, 0, 8))
    with pytest.raises(ValueError, match="Only one LLM can be created under torchrun"):
        make(folder, 2)


def test_ranks_on_a_machine_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get equal shares of the cores. A launcher may expose only one GPU to each rank."""
    threads: list[object] = []
    monkeypatch.setattr(launch, "use_threads", threads.append)
    monkeypatch.setattr(launch, "Group", lambda *given: None)
    monkeypatch.setattr(launch, "resolve_device", torch.device)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    for size in (8, 7, 40):
        launch._connect(PLACE._replace(local_size=size), EngineConfig(device="cpu"))
    launch._connect(PLACE, EngineConfig(device="cpu", threads=32))
    assert threads == [4, 4, 1, 32]
    with pytest.raises(ValueError, match="threads=33 per rank exceeds the 32 available cores"):
        launch._connect(PLACE, EngineConfig(device="cpu", threads=33))
    for shown, number in ((None, 3), ("4,5,6,7", 3), ("GPU-5ebe9", 0)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert PLACE.gpu == number
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    launch._check_devices(EngineConfig(device="cuda", tensor_parallel_size=4), 3)
    for device, error in (
        ("cuda", "=4 needs 4 GPUs on this machine, but 3 are available; lower it or"),
        ("cuda:1", "device='cuda:1' is a single GPU, but tensor_parallel_size=4; use"),
    ):
        with pytest.raises(ValueError, match=error):
            launch._check_devices(EngineConfig(device=device, tensor_parallel_size=4), 4)


@pytest.mark.slow
def test_output_interrupts_and_hanging_rank(folder: Path, whole: LLM) -> None:
    expected, llm = generate(whole), make(folder, 2)
    job: Any = llm.engine.worker.job  # type: ignore[attr-defined]
    [rank] = job.processes
    assert generate(llm) == expected
    assert llm.engine.metrics.spec.num_accepted > 0
    command, fetches = job.command, itertools.count(1)

    def interrupted(name: str) -> Any:
        at = next(fetches) if name == "fetch" else 0
        if at == 4:
            signal.raise_signal(signal.SIGINT)
        if at == 8:
            raise KeyboardInterrupt  # between commands
        return command(name)

    job.command = interrupted
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    assert generate(llm) == expected
    job.seconds = 1
    threading.Timer(0.2, os.kill, (rank.pid, signal.SIGSTOP)).start()
    begun = time.monotonic()
    for repeats in (10_000, 1):
        with pytest.raises(RankFailed, match=r"did not complete '\w+' within distributed_timeout=1 seconds"):
            [generate(llm) for _ in range(repeats)]
    assert time.monotonic() - begun < 10
    assert rank.returncode == -signal.SIGKILL
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
import json, os, random, signal, sys
from nanospec import LLM, SamplingParams, SimpleDrafter, SpecConfig

class CustomDrafter(SimpleDrafter):
    def draft(self, tokens, k):
        return random.choices(tokens, k=k)

def generate():
    sampling = [SamplingParams(max_tokens=30, seed=3, temperature=t) for t in (0, 0.9)]
    return [output.token_ids for output in llm.generate([[5, 9, 5, 9], [8, 3, 8, 3]], sampling)]

spec = SpecConfig(num_speculative_tokens=4)
options = {"device": "cpu", "threads": 1, "dtype": "float32", "max_model_len": 128, "spec": spec}
llm = LLM(sys.argv[1], drafter=["ngram", CustomDrafter()], tensor_parallel_size=2, **options)
result = {"before": generate(), "accepted": llm.engine.metrics.spec.num_accepted}
child = os.fork()
if not child:
    try:
        generate()
    except ConnectionError as error:
        print(json.dumps(str(error)), flush=True)
    sys.exit()
os.waitpid(child, 0)
result["after"] = generate()
result["ranks"] = [process.pid for process in llm.engine.worker.job.processes]
print(json.dumps(result), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_script_with_own_drafter_and_fork_leaves_no_ranks(folder: Path, whole: LLM, tmp_path: Path) -> None:
    """The script defines a drafter, forks, and is killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    child, result = map(json.loads, done.stdout.splitlines())
    assert child == "A forked process cannot use the ranks of its parent; create a new LLM in it."
    sampling = [SamplingParams(max_tokens=30, seed=3, temperature=t) for t in (0, 0.9)]
    outputs = whole.generate([[5, 9, 5, 9], [8, 3, 8, 3]], sampling)
    assert result["before"] == result["after"] == [output.token_ids for output in outputs]
    assert result["accepted"] > 0
    assert_gone(result["ranks"])
    assert not list((tmp_path / "tmp").glob("nanospec-*"))
