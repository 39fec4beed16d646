"""Ranks as processes: they start, match a single process, and none survives the end of the job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.drafters import Drafter
from nanospec.extras.tensor_parallel import job as job_module
from nanospec.extras.tensor_parallel import launch
from nanospec.extras.tensor_parallel.group import RankInfo, torchrun_rank_info
from nanospec.extras.tensor_parallel.job import RankFailed
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.llm import Prompt
from tests.nanospec.extras.tensor_parallel.test_job import eventually
from tests.ranks import weights_of
from tests.tiny import tiny_config, tiny_tokenizer

ROOT = Path(__file__).parents[4]
PROMPTS: list[Prompt] = ["a red red green red red", "ab ab ab abab", [5, 9, 5, 9, 5], "ab red"]
GRAMMAR = {"type": "regex", "regex": "(ab|red)+"}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, stop=["q"]),
    SamplingParams(temperature=0.9, seed=4, top_p=0.8, max_tokens=20, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, response_format=GRAMMAR),
]
Texts = list[tuple[str, list[int]]]


def random_model(folder: Path) -> Path:
    """Write a random checkpoint with a tokenizer to the folder and return it."""
    folder.mkdir(exist_ok=True)
    vocab_size = tiny_tokenizer(folder).vocab_size
    fields = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights_of(tiny_config(vocab_size=vocab_size)), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random"))


def make(folder: Path, size: int, **options: Any) -> LLM:
    spec = SpecConfig(num_speculative_tokens=4)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "threads": 1, **options}
    return LLM(folder, spec=spec, device="cpu", tensor_parallel_size=size, **options)


def generate(llm: LLM) -> Texts:
    return [(output.text, output.token_ids) for output in llm.generate(PROMPTS, PARAMS)]


def processes_of(llm: LLM) -> list[subprocess.Popen[bytes]]:
    processes: list[subprocess.Popen[bytes]] = llm.engine.worker.job.processes  # type: ignore[attr-defined]
    return processes


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: Sequence[int]) -> None:
    eventually(lambda: not any(map(is_alive, pids)))


class Unequal(Drafter):
    """A drafter that fails when it is unpickled by another rank."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __reduce__(self) -> Any:
        return fail, self.given

    def propose(self, table: Table, rows: Any, k: int) -> Proposal:
        raise NotImplementedError


def fail(*given: object) -> None:
    raise ValueError("This drafter is for one process.")


def test_start_failures_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank is a thread here."""
    make_worker, threads = launch._worker, list[threading.Thread]()

    def slowly(arguments: Any, tokenizer: Any, group: Any, job: Any = None) -> Any:
        time.sleep(0.5 if job else 0)  # so that the other rank fails first
        return make_worker(arguments, tokenizer, group, job)

    def start_thread(leader: RankInfo, processes: Any) -> None:
        other = leader._replace(rank=1, local_rank=1)
        threads.append(threading.Thread(target=lambda: results.append(launch.follow(other))))
        threads[-1].start()

    results: list[int] = []
    monkeypatch.setattr(launch, "_worker", slowly)
    monkeypatch.setattr(launch, "_start_followers", start_thread)
    monkeypatch.setattr(job_module, "GRACE", 0.2)  # a leader loading weights may exceed it
    with pytest.raises(ValueError, match="tensor_parallel_size=3 cannot split 4 attention heads"):
        make(folder, 3)
    with pytest.raises(ValueError, match=r"Unequal object at .* cannot be sent .*: Can't pickle local"):
        make(folder, 2, drafter=Unequal(lambda: None))
    with pytest.raises(ValueError, match="^kv_cache_memory of 99 bytes hold"):
        make(folder, 2, kv_cache_memory=99)
    with pytest.raises(RankFailed, match="^Rank 1 failed, .*: This drafter is for one process"):
        make(folder, 2, drafter=Unequal())
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert results == [1, 1]


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
    [path] = re.findall(rf"run_follower\({os.getpid()}, RankInfo\({place}\)\)", given["program"])
    assert not Path(path).exists()
    assert given["env"].items() >= {**os.environ, "PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1",
                                    "PYTHONPATH": given["env"]["PYTHONPATH"]}.items()  # fmt: skip
    assert given["env"]["PYTHONPATH"].split(os.pathsep)[-1] == str(ROOT)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> RankInfo:
    """torchrun's environment for the 12th of 16 processes, on the second of two machines."""
    for name, value in (("RANK", 11), ("WORLD_SIZE", 16), ("LOCAL_RANK", 3), ("LOCAL_WORLD_SIZE", 8)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun_rank_info() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    actual = torchrun_rank_info()
    assert actual == RankInfo(11, 16, 3, 8)
    return actual


def test_torchrun_allows_one_llm_of_all_processes(
    folder: Path, place: RankInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"torchrun started 16 processes, but tensor_parallel_size=2;"):
        make(folder, 2)
    store = HashStore()
    store.add("nanospec/leaders", 1)
    monkeypatch.setattr(RankInfo, "store", lambda self: store)
    monkeypatch.setattr(launch, "torchrun_rank_info", lambda: place._replace(rank=0, size=2, local_rank=0))
    with pytest.raises(ValueError, match="Only one LLM can be created under torchrun"):
        make(folder, 2)


def test_ranks_on_a_machine_share_cores_and_gpus(place: RankInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equally, also with ranks on other machines; a launcher may show each rank only its own GPU."""
    threads: list[object] = []
    monkeypatch.setattr(launch, "use_threads", threads.append)
    monkeypatch.setattr(launch, "Group", lambda *given: None)
    monkeypatch.setattr(RankInfo, "store", lambda self: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    for size in (8, 7, 40):
        launch._connect(place._replace(local_size=size), EngineConfig(device="cpu"))
    launch._connect(place, EngineConfig(device="cpu", threads=32))
    assert threads == [4, 4, 1, 32]
    with pytest.raises(ValueError, match="threads=33 per rank exceeds the 32 available cores"):
        launch._connect(place, EngineConfig(device="cpu", threads=33))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert place.gpu == 3
    for shown, number in (("4,5,6,7", 3), ("5", 0), ("GPU-5ebe9", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert place.gpu == number


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    several = EngineConfig(device="cuda", tensor_parallel_size=4)
    launch._check_devices(several, 3)
    with pytest.raises(ValueError, match="=4 needs 4 GPUs on this machine, but 3 are available; lower it or"):
        launch._check_devices(several, 4)
    with pytest.raises(ValueError, match="device='cuda:1' is a single GPU, but tensor_parallel_size=4; use"):
        launch._check_devices(EngineConfig(device="cuda:1", tensor_parallel_size=4), 3)
    launch._check_devices(EngineConfig(device="cpu", tensor_parallel_size=4), 4)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Texts:
    return generate(make(folder, 1))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """An LLM shared by the tests that leave it unchanged."""
    with make(folder, 2) as llm:
        yield llm
    assert all(process.returncode is not None for process in processes_of(llm))
    with pytest.raises(RuntimeError, match="has been closed; create a new LLM"):
        generate(llm)
    llm.close()  # a second close has no effect


def test_output_matches_one_process(llm: LLM, expected: Texts) -> None:
    assert generate(llm) == expected
    assert "".join(llm.stream(PROMPTS[1], PARAMS[1])) == expected[1][0]
    assert llm.engine.metrics.spec.num_accepted > 0
    report: Any = llm.metrics()
    assert report["memory"][0] == report["memory"][1]
    assert len(processes_of(llm)) == 1


@pytest.mark.parametrize("interrupt", ["between commands", "in a step"])
def test_ctrl_c_ends_requests_only(
    llm: LLM, expected: Texts, interrupt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = llm.engine.worker.job  # type: ignore[attr-defined]
    command, fetches = job.command, [0]

    def interrupted(name: str) -> Any:
        fetches[0] += name == "fetch"
        if fetches[0] == 4:
            fetches[0] += 1
            if interrupt == "between commands":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return command(name)

    monkeypatch.setattr(job, "command", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert generate(llm) == expected


def test_hanging_rank_ends_job_in_time(folder: Path) -> None:
    llm = make(folder, 2)
    [rank] = processes_of(llm)
    llm.engine.worker.job.seconds = 1  # type: ignore[attr-defined]
    threading.Timer(0.2, os.kill, (rank.pid, signal.SIGSTOP)).start()
    begun = time.monotonic()
    with pytest.raises(RankFailed) as raised:
        [generate(llm) for _ in range(10_000)]
    assert time.monotonic() - begun < 10
    sentence = str(raised.value)
    assert re.match(r"A rank did not complete '\w+' within distributed_timeout=1 seconds", sentence)
    assert rank.returncode == -signal.SIGKILL
    for _ in range(2):  # the second time at once
        with pytest.raises(RankFailed) as raised:
            generate(llm)
        assert str(raised.value) == sentence
    assert not llm.engine.has_work
    llm.close()


def test_torchrun(folder: Path, tmp_path: Path) -> None:
    expected = make(folder, 1).generate("a red red", SamplingParams(temperature=0, max_tokens=30))[0]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, logs_specs=DefaultLogsSpecs(str(tmp_path), Std.ALL),
    )  # fmt: skip
    arguments = ["--prompt", "a red red", "--max-tokens", "30", "--temperature", "0", "--json"]
    arguments += ["--tensor-parallel-size", "2", "--max-model-len", "128", "--device", "cpu"]
    arguments += ["--num-speculative-tokens", "3", "--max-num-seqs", "2"]
    command = [str(ROOT / "run.py"), "--model", str(folder), *arguments, "--dtype", "float32"]
    try:
        elastic_launch(config, sys.executable)(*command)
    finally:
        for number, handler in handlers.items():  # the launcher's handlers would end other tests
            signal.signal(number, handler)
    streams = {(file.parent.name, file.stem): file.read_text() for file in tmp_path.rglob("*.log")}
    printed = [line for line in streams["0", "stderr"].splitlines() if line.startswith("Rank ")]
    assert [line.split(" MB")[0].rsplit(" ", 1)[0] for line in printed] == ["Rank 0 needs", "Rank 1 needs"]
    result = json.loads(streams["0", "stdout"])
    assert result["outputs"][0]["token_ids"] == expected.token_ids
    assert len(result["metrics"]["memory"]) == 2
    assert streams["1", "stdout"] == ""


SCRIPT = """
import json, os, random, signal, sys, time
import sibling
from nanospec import LLM, Drafter, SamplingParams, SimpleDrafter, SpecConfig

class Echo(Drafter):
    pass

class CustomDrafter(SimpleDrafter):
    def draft(self, tokens, k):
        after = [i for i, token in enumerate(tokens) if i and tokens[i - 1] == tokens[-1]]
        first = random.choice(after or [0])
        return tokens[first : first + k]

def generate(**params):
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, **params)
    return [output.token_ids for output in llm.generate([[5, 9, 5, 7, 5, 9], [8, 3, 8, 3]], sampling)]

options = {"tensor_parallel_size": 2, "device": "cpu", "threads": 1, "dtype": "float32"}
options |= {"max_model_len": 128, "spec": SpecConfig(num_speculative_tokens=4)}
try:
    LLM(sys.argv[1], drafter=Echo(), **options)
except ValueError as error:
    result = {"echo": str(error)}
llm = LLM(sys.argv[1], drafter=["ngram", CustomDrafter()], **options)
result |= {"seeded": generate(), "greedy": generate(temperature=0)}
result["accepted"] = llm.engine.metrics.spec.num_accepted > 0
child = os.fork()
if not child:
    try:
        generate()
    except ConnectionError as error:
        print(json.dumps({"child": str(error)}), flush=True)
    sys.exit()
os.waitpid(child, 0)
result["after"] = generate()
result["ranks"] = [process.pid for process in llm.engine.worker.job.processes]
result["sessions"] = [os.getsid(0), *map(os.getsid, result["ranks"])]
result["sleeps"] = child = os.fork()
if not child:
    os.close(1), os.close(2)
    time.sleep(100)
print(json.dumps(result), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_user_script(tmp_path: Path) -> None:
    """A drafter defined in the script, a module next to it, forks, and being killed."""
    model = random_model(tmp_path / "model")
    (tmp_path / "queue.py").write_text("raise ImportError('not that of the standard library')")
    program, temporary = tmp_path / "program", tmp_path / "tmp"
    program.mkdir()
    temporary.mkdir()
    (program / "script.py").write_text(SCRIPT)
    (program / "sibling.py").touch()
    command = [sys.executable, str(program / "script.py"), str(model)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    child, result = (json.loads(line) for line in done.stdout.splitlines())
    prompts: list[Prompt] = [[5, 9, 5, 7, 5, 9], [8, 3, 8, 3]]
    with make(model, 1) as llm:
        for what, temperature in {"seeded": 1.0, "greedy": 0.0, "after": 1.0}.items():
            sampling = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, temperature=temperature)
            outputs = llm.generate(prompts, sampling)
            assert result[what] == [output.token_ids for output in outputs], what  # with different drafts
    assert result["accepted"]
    message = "Echo is defined in the main script, which other ranks do not run; move"
    assert result["echo"].startswith(message)
    assert child == {"child": "A forked process cannot use the ranks of its parent; create a new LLM in it."}
    ours, *theirs = result["sessions"]
    assert ours not in theirs
    assert is_alive(result["sleeps"])  # with all the leader's open files
    try:
        assert_gone(result["ranks"])
        assert not list(temporary.glob("nanospec-*"))
    finally:
        os.kill(result["sleeps"], signal.SIGKILL)
