"""An engine that answers lines of a batch, in a process that Ray started.

All its lines run as one batch of the engine, and each is done when it is done. What is wrong with the
settings or with a line is told as a result. A step that fails ends the process: Ray starts another, which
runs again what was under way.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...config import SamplingParams
from ...outputs import Completion, RequestOutput
from ..cli.batch import num_tokens
from ..cli.batch_lines import Task
from ..cli.batch_results import result_line
from ..serve.jobs import JobFailed
from ..serve.loop import EngineLoop
from .replica import Settings, load

if TYPE_CHECKING:
    import pyarrow

UNLIMITED = 1 << 30  # outputs that wait for a row: Ray Data sends no more than there is use for


class Line(NamedTuple):
    """A line to answer: what it asks, as token ids, and with a seed."""

    task: Task
    prompt_ids: list[int]
    params: SamplingParams


class Result(NamedTuple):
    """What became of a line: its result as it is written, and its tokens; or why there is none."""

    number: int  # of the line, from 0
    line: bytes = b""
    tokens: int = 0
    refused: str = ""  # the model cannot take the line
    failed: str = ""  # the replica cannot start


class LineEngine:
    """What Ray Data makes in each process and calls with batches of lines, many at the same time."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.failed = settings, ""
        try:
            self.llm = load(settings)
        except (ValueError, TypeError, OSError) as error:
            self.failed = str(error)
            return
        self.loop = EngineLoop(self.llm, UNLIMITED)
        self._is_started = False

    async def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        lines: list[Line] = [pickle.loads(each) for each in batch.column("line").to_pylist()]
        if not self.failed and not self._is_started:  # here, as it is the event loop's
            self._is_started = True
            self.loop.start()
        return table(await asyncio.gather(*map(self.answer, lines)))

    async def answer(self, line: Line) -> Result:
        """Run one line, beside all others."""
        number = line.task.index
        if self.failed:
            return Result(number, failed=self.failed)
        try:
            self.llm.engine.check(line.prompt_ids, line.params)
        except ValueError as error:
            return Result(number, refused=str(error))
        done: list[Completion] = []
        try:
            async for delta in self.loop.submit([line.prompt_ids], line.params):
                if delta is not None and delta.done is not None:
                    done.append(delta.done)
        except JobFailed:
            os._exit(1)  # the device is in an unknown state
        done.sort(key=lambda each: each.index)
        output = RequestOutput(f"request-{number}", None, line.prompt_ids, done)
        written = result_line(line.task, output, self.settings.model, self.llm.tokenizer.bytes_of)
        return Result(number, written, num_tokens(output))


def table(results: Sequence[Result]) -> pyarrow.Table:
    """Results as Ray Data has them."""
    import pyarrow

    return pyarrow.table({name: [getattr(r, name) for r in results] for name in Result._fields})
