"""Calls from several threads on one LLM: requests share batches, and outputs do not change."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec import LLM, SamplingParams
from nanospec.engine.locking import SharedEngine
from tests.alphabet import ALPHABET, after, greedy, make
from tests.drive import MODES, assert_idle

THREADS = 4


@pytest.fixture(params=["plain", "as-on-gpu"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    llm = make(folder, 3, **MODES[request.param])
    yield llm
    with llm.shared.turn() as engine:
        assert_idle(engine)


def params_of(i: int, **options: Any) -> SamplingParams:
    """Return greedy or sampling parameters for call `i`, with seed `i`."""
    return SamplingParams(temperature=20 * (i % 2), seed=i, max_tokens=5 + 7 * i % 50, **options)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run the calls concurrently, one thread each, and return their results."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        ready.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run, call) for call in calls]]


def test_outputs_do_not_depend_on_other_threads(llm: LLM) -> None:
    """Run batches, single prompts, several outputs per prompt, and streams, some closed before their end."""

    def generate(i: int) -> list[list[int]]:
        prompts = [after(ALPHABET[: 1 + (i + j) % 20]) for j in range(1 + i % 3)]
        outputs = llm.generate(prompts, params_of(i, n=1 + i % 2, ignore_eos=i > 2))
        return [completion.token_ids for output in outputs for completion in output.outputs]

    def stream(i: int) -> list[str]:
        return ["".join(llm.stream(after(ALPHABET[: 1 + i]), params_of(i, ignore_eos=True)))]

    def leave(i: int) -> list[str]:
        for chunk in llm.stream(after("ab"), greedy(ignore_eos=True)):
            assert "cdefgh".startswith(chunk[:6])
            break
        return []

    def several(i: int) -> list[Any]:
        return [work((i + j) % THREADS) for j, work in enumerate((generate, stream, leave))]

    expected = [several(i) for i in range(THREADS)]
    assert at_once([lambda i=i: several(i) for i in range(THREADS)]) == expected  # type: ignore[misc]


def test_threads_share_batches_and_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short call finishes before a long one that began earlier."""
    llm = make(folder, 0)
    calls = [lambda: llm.generate(after("a"), greedy(ignore_eos=True))[0].stats.num_steps] * 4
    assert sum(at_once(calls)) == 240
    steps = llm.metrics()["num_forward_steps"]
    assert isinstance(steps, int)
    assert 60 <= steps < 200

    step, begun = llm.engine.step, threading.Event()

    def slow_step() -> Any:
        begun.set()
        time.sleep(0.002)
        return step()

    def call(prompt: str, **options: Any) -> float:
        llm.generate(after(prompt), greedy(**options))
        return time.perf_counter()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    long = lambda: call("b", ignore_eos=True)  # noqa: E731
    first, last = at_once([lambda: begun.wait(10) and call("a", max_tokens=2), long])
    assert first < last


def test_stream_garbage_collected_during_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [llm.stream(after("ab"), greedy(ignore_eos=True)) for _ in range(2)]
    step = llm.engine.step

    def collecting() -> Any:
        streams.clear()
        return step()

    for stream in streams:
        next(stream)
    del stream
    monkeypatch.setattr(llm.engine, "step", collecting)
    assert llm.generate(after("abc"), greedy())[0].text == ALPHABET[3:]
    assert llm.metrics()["num_aborted"] == 2


def test_interrupt_is_deferred_to_the_end_of_a_turn() -> None:
    """The lock is released. A second Ctrl-C interrupts the turn at once."""
    shared, ends = SharedEngine(Mock()), list[int]()

    def interrupted(times: int) -> None:
        with shared.turn():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            ends.append(times)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with shared.turn() as engine:
            assert engine is shared.engine
    assert ends == [1]
