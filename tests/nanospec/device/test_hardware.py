"""Choice of device, number of threads under quotas, and out-of-memory errors."""

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanospec import SamplingParams
from nanospec.config import EngineConfig
from nanospec.device import hardware, memory
from nanospec.device.hardware import cpu_quota, resolve_device, use_threads
from nanospec.device.memory import explain_oom, is_oom
from nanospec.kernels import launch
from tests.drive import Job, K, make_engine, run
from tests.tiny import tiny_model


class OnlyInside(TorchDispatchMode):
    """Rejects operations outside its `use_device`."""

    depth = 0

    @contextmanager
    def use_device(self, device: torch.device) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert self.depth, f"{func} depends on the current device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("eager", [True, False])
def test_worker_runs_on_its_device(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inside = tiny_model(num_layers=1), OnlyInside()
    monkeypatch.setattr(hardware, "use_device", inside.use_device)
    params = SamplingParams(temperature=0, max_tokens=9, presence_penalty=0.1, logprobs=1)
    with inside:
        k: K = 2 if eager else "auto"  # timing, too
        engine = make_engine(model, k, max_num_seqs=2, async_scheduling=True, enforce_eager=eager)
        run(engine, [Job([1, 2, 3, 1, 2], params), Job([4] * 20, params), Job([5], params)])


def gpu_properties(major: int, kib: int) -> SimpleNamespace:
    """Return the properties of a GPU: major compute capability and shared memory per block."""
    fields = {"name": "A GPU", "major": major, "minor": 5, "multi_processor_count": 20}
    return SimpleNamespace(**fields, shared_memory_per_block_optin=kib << 10)


def test_find_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, kib, family in ((8, 163, "sm_80"), (8, 99, "sm_86"), (9, 227, "sm_90"), (11, 227, "sm_100")):
        gpu = gpu_properties(major, kib)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, gpu=gpu: gpu)
        assert launch.find_gpu.__wrapped__(0) == launch.Gpu(family, 20, kib << 10, pdl=major > 8)


def test_resolve_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test two GPUs, of which the second is current, one GPU, an old one, and none."""
    gpus = {"is_available": True, "device_count": 2, "current_device": 1}
    for name in gpus:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: gpus[name])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu_properties(8, 99))
    monkeypatch.setattr(hardware, "find_gpu", launch.find_gpu.__wrapped__)
    names = {"auto": "cuda:1", "cuda": "cuda:1", "cuda:0": "cuda:0", "cpu": "cpu"}
    assert {name: str(resolve_device(name)) for name in names} == names
    with pytest.raises(ValueError, match="device='cuda:7' does not exist; the last GPU is 'cuda:1'"):
        resolve_device("cuda:7")
    for name in ("cuda:123", "cuda:x", "gpu"):
        with pytest.raises(ValueError, match=f"device='{name}' is not supported; use 'auto', 'cpu' or"):
            resolve_device(name)
    gpus |= {"device_count": 1, "current_device": 0}
    with pytest.raises(ValueError, match="device='cuda:1' does not exist; the last GPU is 'cuda:0'"):
        resolve_device("cuda:1")
    found = [gpu_properties(7, 64), gpu_properties(8, 99)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    with pytest.warns(UserWarning, match="A GPU has .* The CPU is used"):
        assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"A GPU has compute capability 7\.5; nanospec needs 8\.0\."):
        resolve_device("cuda:0")
    gpus |= {"device_count": 2, "current_device": 1}
    assert resolve_device("auto") == torch.device("cuda:1")
    gpus["is_available"] = False
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device='cuda' is not available: no GPU was found; use 'cpu'"):
        resolve_device("cuda")


def test_use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(hardware, "DEFAULT_THREADS", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for quota in (0.5, 1.2, 7.0, math.inf):
        monkeypatch.setattr(hardware, "cpu_quota", lambda quota=quota: quota)
        use_threads("auto")
    use_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    use_threads("auto")  # PyTorch has read it
    assert chosen == [1, 2, 2, 2, 3]


def test_cpu_quota(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, str], float]] = [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 1"}, 2.0),
        ("0::/../a\n", {}, math.inf),
        ("", {}, math.inf),
    ]
    for i, (own, files, expected) in enumerate(cases):
        folder = tmp_path / str(i)
        for name, text in {"own": own, **{f"root/{name}": text for name, text in files.items()}}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        assert cpu_quota(folder / "own", folder / "root") == expected, (own, files)


def test_out_of_memory_errors_are_explained() -> None:
    no_memory = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes"
    capture, unrelated, recovered = (RuntimeError(text) for text in ("capturing", "other", "captured"))
    capture.__context__ = unrelated.__context__ = MemoryError()
    recovered.__context__ = ValueError()
    python, gpu = MemoryError(" first\nsecond"), torch.OutOfMemoryError("first")
    for error in (python, gpu, OSError(errno.ENOMEM, "mmap"), RuntimeError(no_memory), capture):
        assert is_oom(error), repr(error)
    for other in (OSError(errno.ENOENT, "mmap"), ValueError(no_memory), unrelated, recovered):
        assert not is_oom(other), repr(other)
        with pytest.raises(type(other)) as caught, explain_oom("rows", "lower it"):
            raise other
        assert caught.value is other
    explained = r"^Ran out of memory for rows \('first'\); lower it\.$"
    with (
        pytest.raises(memory.OutOfMemory, match=explained),
        explain_oom("a step", "wait"),  # explained once
        explain_oom("rows", "lower it"),
    ):
        raise python
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=2, kv_cache_memory=None, max_model_len=9)
    assert memory.oom_remedy(config) == "lower max_num_batched_tokens=64, max_num_seqs=2 or max_model_len=9"
