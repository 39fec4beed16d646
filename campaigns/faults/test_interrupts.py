"""Test exceptions at any line of host code: nothing leaks, and the next outputs are correct.

`make faults` interrupts every line, or LINES_TRIED lines per test; `make test-long` interrupts a few."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest

from campaigns.faults.engines import JOBS, assert_sound, reference, run, small_llm, small_model, stream
from campaigns.faults.inject import Injector, raising
from nanospec import LLM, RequestOutput

SOME = 12
WAYS: dict[str, Callable[[LLM], Any]] = {"generate": run, "stream": stream}


def lines_to_try(total: int, sample: int | None) -> list[int]:
    """Return the numbers of all lines, or of a sample."""
    lines = range(1, total + 1)
    return list(lines) if sample is None else sorted(random.Random(total).sample(lines, min(sample, total)))


def interrupt(mode: str, way: str, sample: int | None, error: type[BaseException]) -> None:
    model = small_model()
    llm, expected = small_llm(model, mode), reference(model)
    for _ in range(2):
        assert run(llm) == expected
    assert llm.engine.metrics.num_preemptions
    with raising(0) as counted:
        WAYS[way](llm)
    reached = 0
    for at in lines_to_try(counted.lines, sample):
        with raising(at, error) as injector, suppress(error):
            WAYS[way](llm)
        reached += bool(injector.where)
        sound(llm, injector)
        assert not llm.shared._lock.locked(), injector.where
        assert run(llm) == expected, injector.where
        sound(llm, injector)
    assert reached > 0.8 * len(lines_to_try(counted.lines, sample))  # a run may have a few lines less


def sound(llm: LLM, injector: Injector) -> None:
    try:
        with llm.shared.turn() as engine:
            assert_sound(engine)
    except AssertionError as error:
        raise AssertionError(f"after {injector.where}") from error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["plain", "as-on-gpu"])
def test_interrupt_at_some_lines(mode: str, way: str) -> None:
    interrupt(mode, way, SOME, KeyboardInterrupt)


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["plain", "as-on-gpu"])
def test_interrupt_at_every_line(mode: str, way: str, error: type[BaseException]) -> None:
    interrupt(mode, way, int(os.environ.get("LINES_TRIED", "0")) or None, error)


def test_requests_are_always_in_a_queue() -> None:
    """Otherwise a thread that waits for them would wait forever."""
    model = small_model()
    llm, reached = small_llm(model, "plain"), 0
    for at in range(1, 400, 3):
        requests = [llm.engine.add(job.prompt, job.params) for job in JOBS]
        with raising(at) as injector, suppress(KeyboardInterrupt):
            llm.engine.scheduler.schedule()
        reached += bool(injector.where)
        llm.engine.abort_all()
        assert all(request.is_finished for request in requests), injector.where
        assert_sound(llm.engine)
    assert reached > 20


def test_second_ctrl_c_during_abort() -> None:
    """The second interrupt arrives while requests are aborted; streams in other threads still end."""
    model = small_model()
    llm, expected = small_llm(model, "as-on-gpu"), reference(model)
    abort, calls, ends = llm.engine.abort_all, list[str | None](), list[RequestOutput]()

    def interrupted(error: str | None = None) -> None:
        calls.append(error)
        if len(calls) == 1:
            raise KeyboardInterrupt
        abort(error)

    bystander = llm.stream_pieces(JOBS[2].prompt, JOBS[2].params, ends.append)
    next(bystander)
    with mock.patch.object(llm.engine, "abort_all", interrupted):
        failing = mock.patch.object(llm.engine, "step", side_effect=KeyboardInterrupt)
        with failing, pytest.raises(KeyboardInterrupt):
            run(llm)
        thread = threading.Thread(target=lambda: list(bystander), daemon=True)
        thread.start()
        thread.join(20)
    assert not thread.is_alive()
    assert ends[0].finish_reason == "abort"  # its tokens are unspecified
    assert run(llm) == expected
    assert_sound(llm.engine)
