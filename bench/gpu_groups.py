"""What `bench/gpu.py` runs: the groups of each part, the most important first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Group:
    """Cases that are lost together if one of them breaks the process.

    Attributes:
        command: arguments for Python.
        limit: seconds that it may take.
        measures: whether it writes rows, and so takes the options of `bench/rows.py`.
    """

    name: str
    command: tuple[str, ...]
    limit: float = 120
    env: Mapping[str, str] = field(default_factory=dict)
    measures: bool = True


LIMITS = {"smoke": 240, "tests": 530, "steps": 530, "kernels": 530, "e2e": 530, "peers": 530}  # seconds
JOBS = str(os.cpu_count() or 1)


def compiled(cpu: bool, only: str = "", without: str = "") -> list[Group]:
    """All kernels compiled at once, on all cores: one by one, as they are launched, it takes minutes.
    `without`: those that are also needed without dependent launch."""
    command = ("bench/compile.py", "--targets", "sm_90", "--jobs", JOBS)
    groups = [Group("compile", (*command, *(("--only", only) if only else ())), 120, measures=False)]
    if without:
        off = {"NANOSPEC_PDL": "0"}
        name = "compile without dependent launch"
        groups.append(Group(name, (*command, "--only", without), 60, off, measures=False))
    return [] if cpu else groups


def smoke(cpu: bool) -> list[Group]:
    shapes = ("tiny",) if cpu else ("qwen3-0.6b", "qwen3-8b")
    return [
        Group("environment", ("bench/smoke.py", "environment"), 60),
        *compiled(cpu, without="qwen3"),
        Group("equality", ("bench/smoke.py", "equality"), 90),
        Group("waiting", ("bench/smoke.py", "waiting"), 60),
        *(Group(shape, ("bench/smoke.py", "speed", "--shape", shape), 90) for shape in shapes),
    ]


def tests(cpu: bool) -> list[Group]:
    """A file of tests each; those that run engines first, kernels behind them, all else as found."""
    first = ("test_engine.py", "test_kernels.py", "test_spec_kernels.py")
    found = {path.name: path for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))}
    ordered = [name for name in first if name in found] + [name for name in found if name not in first]
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # poisoned memory needs deterministic algorithms
    files = [
        Group(name.removesuffix(".py"), ("bench/gpu_tests.py", f"tests/gpu/{name}"), 240, workspace)
        for name in ordered
    ]
    return [*compiled(cpu), *files]


def steps(cpu: bool) -> list[Group]:
    def group(name: str, shape: str, limit: float, *options: str) -> Group:
        return Group(name, ("bench/steps.py", "--shape", shape, *options), limit)

    if cpu:
        grid = ("--contexts", "64", "--batches", "1", "2", "--ks", "0", "2", "--repeats", "2")
        return [
            group("tiny", "tiny", 120, *grid),
            group("tiny drafters", "tiny", 120, "--drafters", *grid),
            Group("tiny gap", ("bench/gap.py", "--shape", "tiny", "--batches", "1", "2"), 120),
            Group("memory", ("bench/smoke.py", "memory", "--shape", "tiny", "--part", "steps"), 120),
        ]
    small, large, llama = "qwen3-0.6b", "qwen3-8b", "llama-3.2-1b"
    more = ("--batches", "1", "4", "8", "16", "64", "--ks", "0", "1", "2", "4", "8", "16")
    return [
        *compiled(cpu),
        group("0.6B", small, 90),
        group("8B", large, 120),
        Group("0.6B gap", ("bench/gap.py", "--shape", small), 60),
        Group("8B gap", ("bench/gap.py", "--shape", large), 60),
        group("Llama-1B", llama, 60),
        Group("memory", ("bench/smoke.py", "memory", "--shape", small, "--part", "steps"), 90),
        group("0.6B long", small, 90, "--contexts", "8192", "32768"),
        group("8B long", large, 120, "--contexts", "8192", "32768"),
        group("0.6B drafters", small, 90, "--drafters"),
        group("0.6B more", small, 90, *more, "--besides"),
        group("8B more", large, 90, *more, "--besides"),
    ]


def kernels(cpu: bool) -> list[Group]:
    def group(name: str, limit: float, *only: str) -> Group:
        return Group(name, ("bench/kernels.py", "--besides", "--only", *only), limit)

    if cpu:
        return [group("norm", 60, "rms_norm-H576"), group("lookup", 60, "ngram-B1-L1024")]
    return [
        *compiled(cpu),
        group("attention", 120, "^attention-qwen3-.*-q[15]-"),
        group("products", 120, r"qwen3-.*-T\d"),
        group("lookup", 60, "^ngram-"),
        group("small", 60, "^layout", "^verify", "^rope", "^rms_norm"),
        group("sample", 90, "^sample"),
        group("further products", 90, r"-\w+-T\d"),
        group("rest", 120, ""),
    ]


def e2e(cpu: bool) -> list[Group]:
    if cpu:
        few = ("--batches", "1", "2", "--max-tokens", "8", "--seconds", "1")
        return [Group("tiny", ("bench/e2e.py", "--shape", "tiny", *few), 120)]
    some = ("--batches", "1", "16", "64")
    return [
        *compiled(cpu),
        Group("0.6B", ("bench/e2e.py", "--shape", "qwen3-0.6b", *some), 150),
        Group("8B", ("bench/e2e.py", "--shape", "qwen3-8b", *some), 210),
        Group("0.6B more", ("bench/e2e.py", "--shape", "qwen3-0.6b", "--batches", "4", "128"), 120),
    ]


def peers(cpu: bool) -> list[Group]:
    def group(name: str, limit: float, *arguments: str) -> Group:
        return Group(name, ("bench/peers/gpu.py", *arguments), limit)

    shapes = ("tiny",) if cpu else ("qwen3-0.6b", "qwen3-8b")
    return [
        *compiled(cpu, "attention"),
        *(group(f"plain {shape}", 150, "plain", "--shape", shape) for shape in shapes),
        group("FA3", 90, "attention"),
        group("transformers", 150, "transformers", "--shape", shapes[0]),
    ]


Part = Callable[[bool], list[Group]]
PARTS: dict[str, Part] = {
    "smoke": smoke, "tests": tests, "steps": steps, "kernels": kernels, "e2e": e2e, "peers": peers
}  # fmt: skip
