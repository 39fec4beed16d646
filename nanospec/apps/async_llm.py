"""`AsyncLLM`: the API of `LLM` for asyncio.

    async with AsyncLLM("smollm2-135m-instruct") as llm:
        outputs = await asyncio.gather(*(llm.generate(prompt) for prompt in prompts))  # one batch
        async for text in llm.stream("Once upon a time", params): ...

The event loop is not blocked: loading, tokenization and the engine (`serve/loop.py`) run in other threads.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..config import SamplingParams
from ..llm import LLM, check_single
from ..outputs import Completion, RequestOutput
from ..text.chat import Messages, Prompt
from .serve.loop import EngineLoop

OnFinish = Callable[[RequestOutput], Any]


class AsyncLLM:
    """An LLM for one event loop; takes the arguments of `LLM`. The model is loaded at the start of an `async
    with` block. At its end, running requests fail with RuntimeError. Concurrent requests are batched;
    cancelling a task or closing a stream aborts its request."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._model, self._options = model, options
        self._llm: LLM | None = None

    async def __aenter__(self) -> AsyncLLM:
        self._llm = await asyncio.to_thread(LLM, self._model, **self._options)
        self._engine = EngineLoop(self._llm, sys.maxsize)
        self._engine.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._engine.stop()
        await asyncio.to_thread(self.llm.close)

    @property
    def llm(self) -> LLM:
        """The underlying `LLM`, for `metrics` and `chat_prompt`, not to run requests."""
        if self._llm is None:
            raise RuntimeError("The model is not loaded; use `async with AsyncLLM(...) as llm`.")
        return self._llm

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Generate the outputs of one prompt. Raises ValueError, or RuntimeError if the engine fails."""
        outputs: list[RequestOutput] = []
        async for _ in self._run(prompt, sampling_params, False, outputs.append):
            pass
        return outputs[0]

    async def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> RequestOutput:
        """Answer one conversation; see `LLM.chat`."""
        prompt = await asyncio.to_thread(self.llm.chat_prompt, messages, **template_options)
        return await self.generate(prompt, sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, on_finish: OnFinish | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the text of one output as it is produced; see `LLM.stream`."""
        check_single(sampling_params)
        return self._run(prompt, sampling_params, True, on_finish)

    async def _run(
        self, prompt: Prompt, params: SamplingParams | None, streams: bool, on_finish: OnFinish | None
    ) -> AsyncGenerator[str, None]:
        [(text, ids, sampling)] = await asyncio.to_thread(self.llm.check_prompts, [prompt], params)
        job, done = self._engine.submit([ids], sampling, streams), list[Completion]()
        try:
            async for delta in job:
                if delta is not None:
                    done += [] if delta.done is None else [delta.done]
                    if new := "".join(piece.text for piece in delta.pieces):
                        yield new
        finally:
            job.abort()
        done.sort(key=lambda output: output.index)
        if on_finish is not None:
            on_finish(RequestOutput(f"request-{uuid4().hex}", text, ids, done))
