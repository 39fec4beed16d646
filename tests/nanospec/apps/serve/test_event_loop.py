"""Every submitted job ends with a result or an error, even if the engine's thread ends before taking it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM, SamplingParams
from nanospec.apps.serve.jobs import ENDED, FAILED, Job, JobFailed
from nanospec.apps.serve.loop import EngineLoop
from tests.nanospec.test_llm import after, folder, make

__all__ = ["folder"]
PARAMS = SamplingParams(temperature=0, max_tokens=9)


def fail(*_: Any) -> Any:
    raise RuntimeError("broken")


async def end_of(job: Job) -> str:
    """Return the message of the failure that ends the job."""

    async def read() -> str:
        try:
            async for _ in job:
                pass
        except JobFailed as error:
            return str(error)
        return ""

    return await asyncio.wait_for(read(), 20)


@pytest.fixture
def busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineLoop, list[int], threading.Event]:
    """An engine loop whose steps wait for an event, a prompt, and that event."""
    llm, go = make(folder), threading.Event()
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (go.wait(20), step())[1])
    return EngineLoop(llm, 10), llm.tokenizer.encode(after("a")), go


async def ends_of_two(loop: EngineLoop, ids: list[int], end: Callable[[], Awaitable[None]]) -> list[str]:
    """Return how two jobs end, one submitted before and one during a step."""
    jobs = [loop.submit([ids], PARAMS)]
    while not loop._live:
        await asyncio.sleep(0.005)
    jobs.append(loop.submit([ids], PARAMS))
    await end()
    return list(await asyncio.gather(*map(end_of, jobs)))


def test_jobs_submitted_during_and_after_the_last_step(busy: Any) -> None:
    loop, ids, go = busy

    async def run() -> list[str]:
        loop.start()

        async def end() -> None:
            stop = asyncio.ensure_future(loop.stop())
            await asyncio.sleep(0.05)
            go.set()
            await stop

        return [*await ends_of_two(loop, ids, end), await end_of(loop.submit([ids], PARAMS))]

    assert asyncio.run(run()) == [ENDED] * 3
    assert (loop.num_outputs, loop._jobs) == (0, set())


def test_jobs_submitted_during_a_step_whose_cleanup_fails(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ids, go = busy
    llm: LLM = loop.llm
    monkeypatch.setattr(llm.shared, "step", lambda: (go.wait(20), fail()))
    monkeypatch.setattr(llm.engine, "abort_all", fail)

    async def run() -> list[str]:
        loop.start()

        async def end() -> None:
            go.set()

        return [*await ends_of_two(loop, ids, end), await end_of(loop.submit([ids], PARAMS))]

    assert asyncio.run(run()) == [FAILED] * 3
    assert loop.fatal_error is not None
    assert loop.num_outputs == 0


def test_job_that_can_be_neither_queued_nor_aborted(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ids, go = busy
    engine, calls = loop.llm.engine, []
    new, abort = engine.new, engine.abort

    def second_fails(*values: Any) -> Any:
        calls.append(values)
        return fail() if len(calls) == 2 else new(*values)

    def first_fails(*values: Any) -> None:
        monkeypatch.setattr(engine, "abort", abort)
        fail()

    monkeypatch.setattr(engine, "new", second_fails)
    monkeypatch.setattr(engine, "abort", first_fails)

    async def run() -> str:
        loop.start()
        go.set()
        result = await end_of(loop.submit([ids, ids], PARAMS))
        await loop.stop()
        return result

    assert asyncio.run(run()) == FAILED
