"""Test out-of-memory errors: the message names the settings to lower, and the engine stays usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanospec.device.graphs
import nanospec.extras.loading
from campaigns.faults.engines import JOBS, assert_sound, reference, run, small_engine, small_llm, small_model
from nanospec import SamplingParams
from nanospec.device.graphs import EagerCapture
from nanospec.device.memory import OutOfMemory
from nanospec.device.step import StepResult
from tests.alphabet import folder, make
from tests.drive import Job, finish

__all__ = ["folder"]
SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
    OSError(12, "Cannot allocate memory"),
]


def failing_at(target: Any, name: str, at: int, error: BaseException) -> list[int]:
    """Make call number `at` of a method raise an error. Return a list with the number of calls so far."""
    original, calls = getattr(target, name), [0]

    def call(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise error
        return original(*args, **named)

    setattr(target, name, call)
    return calls


@pytest.mark.parametrize("mode", ["plain", "as-on-gpu"])
def test_out_of_memory_in_prefill_aborts_one_request(mode: str) -> None:
    """Requests that share its blocks are also aborted; all others continue."""
    model = small_model()
    jobs = [JOBS[0], Job([9, 8, 7], SamplingParams(temperature=0, max_tokens=30)), *JOBS[1:], JOBS[2]]
    expected = reference(model, jobs)
    for at in (1, 2, 4):
        engine = small_engine(model, mode, num_blocks=14, max_num_seqs=6)
        prefill = engine.worker.prefill
        calls = failing_at(engine.worker, "prefill", at, SHORTAGES[at % len(SHORTAGES)])
        requests = [engine.add(job.prompt, job.params) for job in jobs]
        finish(engine)
        assert_sound(engine)
        lost = [request for request in requests if request.finish_reason == "abort"]
        assert bool(lost) == (calls[0] >= at)
        assert len(lost) < len(jobs)
        for request, output in zip(requests, expected, strict=True):
            if request in lost:
                assert request.error is not None
                assert "Ran out of memory for the prompt; lower max_num_batched_tokens=24" in request.error
            else:
                assert request.output_ids == output, at
        engine.worker.prefill = prefill  # type: ignore[method-assign]
        again = [engine.add(job.prompt, job.params) for job in jobs]  # no unwritten block is reused
        finish(engine)
        assert [request.output_ids for request in again] == expected
        assert_sound(engine)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_out_of_memory_in_step_names_settings_to_lower(error: BaseException) -> None:
    model = small_model()
    llm, expected = small_llm(model, "as-on-gpu"), reference(model)
    failing_at(llm.engine.worker, "step", 5, error)
    with pytest.raises(OutOfMemory, match=r"a step, .*; lower max_num_batched_tokens=24, max_num_seqs=3"):
        run(llm)
    assert_sound(llm.engine)
    assert run(llm) == expected


@pytest.mark.parametrize("where", ["load_model_and_drafters", "Worker"])
def test_out_of_memory_while_loading_suggests_a_fix(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*args: Any) -> Any:
        raise SHORTAGES[0]

    monkeypatch.setattr(nanospec.extras.loading, where, short)
    fix = "the weights on cpu .*a smaller model" if where != "Worker" else "in addition.*lower max_num"
    with pytest.raises(OutOfMemory, match=f"^Ran out of memory for .*{fix}"):
        make(folder, 3)


class FailingCapture(EagerCapture):
    """Runs out of memory in its first capture, which then fails like a CUDA graph."""

    error: Exception | None = None

    def __init__(self, step: Callable[[], StepResult]) -> None:
        super().__init__(step)
        if (error := FailingCapture.error) is not None:
            FailingCapture.error = None
            try:
                raise error
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize("lazy", [False, True])
def test_out_of_memory_in_capture_names_settings_to_lower(
    folder: Path, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture runs when the engine is created, or lazily with running requests. The next requests run."""
    monkeypatch.setattr(nanospec.device.graphs, "EagerCapture", FailingCapture)
    monkeypatch.setattr(FailingCapture, "error", SHORTAGES[0])
    message = r"'CUDA error: .* during capture'\); lower max_num_batched_tokens=\d+, max_num_seqs=\d+"
    options: dict[str, Any] = {"enforce_eager": False, "lazy_capture": lazy}
    if not lazy:
        with pytest.raises(OutOfMemory, match=message):
            make(folder, 3, **options)
        return
    model = small_model()
    llm, expected = small_llm(model, "as-on-gpu", **options), reference(model)
    with pytest.raises(OutOfMemory, match=message):
        run(llm)
    assert_sound(llm.engine)
    assert run(llm) == expected
