"""`AsyncLLM`: concurrent requests are batched, and abandoned ones are aborted."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanospec.apps import async_llm
from tests.alphabet import ALPHABET, after, greedy
from tests.drive import assert_idle

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}
ENDLESS = greedy(ignore_eos=True, max_tokens=90, num_speculative_tokens=0)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def idle(llm: AsyncLLM, num_aborted: int) -> None:
    while llm.llm.engine.metrics.num_aborted != num_aborted or llm.llm.engine.has_work:
        await asyncio.sleep(0.01)
    assert_idle(llm.llm.engine)


def test_concurrent_requests_are_batched(folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(folder, **OPTIONS) as llm:
            message, ends = {"role": "user", "content": after("abc")}, list[RequestOutput]()
            prompt, texts = llm.llm.chat_prompt([message]), list[str]()

            async def stream() -> None:
                async for text in llm.stream(prompt, greedy(), ends.append):
                    texts.append(text)

            with llm.llm.shared.turn():  # no step runs before all requests are queued
                calls = llm.generate(after("ab"), greedy(n=2)), llm.chat([message], greedy())
                tasks, streamed = [*map(asyncio.create_task, calls)], asyncio.create_task(stream())
                while llm._engine.num_outputs < 4:
                    await asyncio.sleep(0.01)
            two, chat = await asyncio.gather(*tasks)
            await streamed
            assert [each.text for each in two.outputs] == [ALPHABET[2:]] * 2
            assert (two.prompt, chat.prompt, chat.text) == (after("ab"), None, ALPHABET[3:])
            assert "".join(texts) == ends[0].text == ALPHABET[3:]
            assert len(texts) > 1
            steps = [each.stats.num_steps for each in (*two.outputs, *chat.outputs, *ends[0].outputs)]
            assert llm.llm.engine.metrics.num_forward_steps < sum(steps) / 2
            with pytest.raises(ValueError, match="The prompt is empty"):
                await llm.generate("")
            with pytest.raises(ValueError, match=r"n=2 is not supported by stream\(\)"):
                llm.stream("a", SamplingParams(n=2))

    run(main())


def test_abandoned_requests_are_aborted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncLLM(folder, **OPTIONS) as llm:
            step = llm.llm.engine.step

            def slow_step() -> Any:
                time.sleep(0.02)
                return step()

            monkeypatch.setattr(llm.llm.engine, "step", slow_step)
            task = asyncio.create_task(llm.generate(after("ab"), ENDLESS))
            async with aclosing(llm.stream(after("ab"), ENDLESS)) as stream:
                await anext(stream)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(llm, 2)
            last = asyncio.create_task(llm.generate(after("ab"), ENDLESS))
            await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="The engine was shut down before"):
            await last
        with pytest.raises(RuntimeError, match="The engine was shut down before"):
            await llm.generate("ab")

    run(main())


def test_event_loop_runs_while_the_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm, gate = AsyncLLM(folder, **OPTIONS), threading.Event()
        with pytest.raises(RuntimeError, match="The model is not loaded; use `async with"):
            await llm.generate("ab")
        monkeypatch.setattr(async_llm, "LLM", lambda *args, **options: gate.wait(9) and LLM(*args, **options))
        asyncio.get_running_loop().call_later(0.05, gate.set)
        async with llm:
            assert (await llm.generate(after("ab"), greedy())).text == ALPHABET[2:]

    run(main())
