"""`AsyncLLM`: concurrent requests are batched, and abandoned ones are aborted."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanospec.apps import async_llm
from tests.alphabet import ALPHABET, after, greedy
from tests.drive import assert_idle

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}
ENDLESS = greedy(ignore_eos=True, max_tokens=90, num_speculative_tokens=0)


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    return wraps(test)(lambda **fixtures: asyncio.run(asyncio.wait_for(test(**fixtures), 60)))


@in_event_loop
async def test_concurrent_requests_are_batched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, may_load = AsyncLLM(folder, **OPTIONS), threading.Event()
    with pytest.raises(RuntimeError, match="The model is not loaded; use `async with"):
        await llm.generate("ab")
    monkeypatch.setattr(async_llm, "LLM", lambda *args, **more: may_load.wait(9) and LLM(*args, **more))
    asyncio.get_running_loop().call_later(0.05, may_load.set)  # not if loading blocks the event loop
    async with llm:
        message, ends = {"role": "user", "content": after("abc")}, list[RequestOutput]()
        stream = llm.stream(llm.llm.chat_prompt([message]), greedy(), ends.append)
        with llm.llm.shared.turn():  # no step runs before all requests are queued
            calls = llm.generate(after("ab"), greedy(n=2)), llm.chat([message], greedy())
            tasks = [*map(asyncio.create_task, calls)]
            first = asyncio.ensure_future(anext(stream))
            while llm._engine.num_outputs < 4:
                await asyncio.sleep(0.01)
        texts = [await first, *[text async for text in stream]]
        two, chat = await asyncio.gather(*tasks)
        assert [each.text for each in two.outputs] == [ALPHABET[2:]] * 2
        assert (two.prompt, chat.prompt, chat.text) == (after("ab"), None, ALPHABET[3:])
        assert "".join(texts) == ends[0].text == ALPHABET[3:]
        assert len(texts) > 1
        assert not llm.llm.engine.history.requires_key
        steps = [each.stats.num_steps for each in (*two.outputs, *chat.outputs, *ends[0].outputs)]
        assert llm.llm.engine.metrics.num_forward_steps < sum(steps) / 2
        with pytest.raises(ValueError, match="The prompt is empty"):
            await llm.generate("")
        with pytest.raises(ValueError, match=r"n=2 is not supported by stream\(\)"):
            llm.stream("a", SamplingParams(n=2))


@in_event_loop
async def test_abandoned_requests_are_aborted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(folder, **OPTIONS) as llm:
        engine = llm.llm.engine
        step = engine.step

        def slow_step() -> Any:
            time.sleep(0.02)
            return step()

        monkeypatch.setattr(engine, "step", slow_step)
        task = asyncio.create_task(llm.generate(after("ab"), ENDLESS))
        async with aclosing(llm.stream(after("ab"), ENDLESS)) as stream:
            await anext(stream)
            task.cancel()
        while engine.metrics.num_aborted < 2:
            await asyncio.sleep(0.01)
        with llm.llm.shared.turn():  # after the abort
            assert_idle(engine)
        last = asyncio.create_task(llm.generate(after("ab"), ENDLESS))
        await asyncio.sleep(0.1)
    for call in (last, llm.generate("ab")):
        with pytest.raises(RuntimeError, match="The engine was shut down before"):
            await call
