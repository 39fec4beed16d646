"""The engine in a thread of its own, and what asyncio asks of it.

    job = engine_loop.submit(prompts, params, streams=True)    in the event loop
    async for delta in job: ...                                what each step gave, until all outputs are done
    job.abort()                                                its blocks are free before the next step

All jobs run as one batch. The thread takes what was submitted and aborted, runs one step, and hands over what
it gave in one go. A step that raises ends the jobs under way with an error, and the next ones are served.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from ..config import SamplingParams
from ..llm import LLM
from ..outputs import Completion
from ..request import Logprob, Piece, Request
from .logs import log

MOST_FAILURES = 3  # steps in a row, after which the engine is taken for broken
RECENT = 32  # ended outputs that tell how long others will take


class QueueFull(Exception):
    """Too much is waiting; `seconds` until there may be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"The queue is full; try again in about {seconds} s.")
        self.seconds = seconds


class EngineFailed(Exception):
    """Why a job was not finished, and the status of HTTP that says so."""

    status = 500
    sentence = "The engine failed in the middle of this request, which may be sent again."

    def __init__(self) -> None:
        super().__init__(self.sentence)


class TooSlow(EngineFailed):
    status = 504
    sentence = "The request took longer than the server allows."


class Ending(EngineFailed):
    status = 503
    sentence = "The server has ended before it could finish this request."


class Delta(NamedTuple):
    """What one output of a job got.

    Attributes:
        choice: the output's number in the job.
        pieces: its new tokens as text; empty where the job does not stream.
        logprobs: of these tokens, if they were asked for.
        drafted, accepted, drafter: guesses of the steps that gave them.
        rejected: the texts of those struck out, in a traced engine.
        done: the whole output, when it has ended.
    """

    choice: int
    pieces: list[Piece]
    logprobs: list[dict[int, Logprob]]
    drafted: int
    accepted: int
    drafter: str
    rejected: list[str]
    done: Completion | None


class Job:
    """The outputs that one client waits for: `n` of each of its prompts, in this order."""

    def __init__(self, engine_loop: EngineLoop, num_outputs: int, streams: bool) -> None:
        self.num_outputs, self.streams = num_outputs, streams
        self.left = num_outputs
        self._engine_loop = engine_loop
        self._deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Everything that its outputs get. Raises EngineFailed."""
        left = self.num_outputs
        while left:
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            left -= delta.done is not None
            yield delta

    def put(self, delta: Delta | Exception) -> None:
        self._deltas.put_nowait(delta)

    def abort(self) -> None:
        """End what has not ended. Nothing more comes."""
        self._engine_loop.abort(self)


@dataclass(eq=False)
class _Live:
    """An output under way, in the engine's thread."""

    job: Job
    index: int
    request: Request
    num_sent: int = 0  # tokens whose pieces were handed over
    num_tokens: int = 0  # and what else was told of its steps
    num_steps: int = 0
    accepted: int = 0
    drafted: dict[str, int] = field(default_factory=dict)  # by drafter
    last: float = field(default_factory=time.perf_counter)


class EngineLoop:
    """Runs the engine of an `LLM`. All methods are the event loop's, but those that begin with an underscore.

    Attributes:
        num_outputs: accepted and not yet ended; at most `most`.
        gap_seconds: between steps while there was work; the host's own part of a step is in the stages.
        failures: steps that raised, since the latest one that did not.
        on_tokens, on_done: called in the engine's thread with the seconds since an output's last tokens and
            the number of new ones, and with each ended output.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        self.llm, self.most = llm, most
        self.num_outputs = 0
        self.failures = 0
        self.gap_seconds = 0.0
        self.on_tokens: Callable[[float, int], None] = lambda seconds, count: None
        self.on_done: Callable[[Completion, int], None] = lambda done, num_prompt: None
        self._live: dict[Request, _Live] = {}
        self._numbers = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; to be called in the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End what runs, and the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered: the thread runs, and not all of its latest steps failed."""
        return self._thread.is_alive() and self.failures < MOST_FAILURES

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        salt: bytes = b"",
        streams: bool = False,
    ) -> Job:
        """Have prompts answered, which must have been checked. `salt` names who may share their cached
        blocks. Raises QueueFull."""
        job = Job(self, len(prompts) * params.n, streams)
        if self.num_outputs + job.num_outputs > self.most:
            raise QueueFull(self.seconds_left())
        self.num_outputs += job.num_outputs
        self._do(lambda: self._add(job, prompts, params, salt))
        return job

    def seconds_left(self) -> int:
        """About how long until there is room: what an ended output made way for, at the latest rate."""
        if len(self._ends) < 2:
            return 1
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(ceil(each * max(self.num_outputs - self.most + 1, 1)), 1), 60)

    def abort(self, job: Job) -> None:
        """End a job; see `Job.abort`."""
        if job.left:
            self.num_outputs -= job.left
            job.left = 0
            self._do(lambda: self._abort(job))

    def end_all(self) -> None:
        """End all jobs, as there is no more time for them."""
        self._do(lambda: self._fail(Ending()))

    def _do(self, action: Callable[[], None]) -> None:
        """Have the engine's thread do something before its next step."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # What follows runs in the engine's thread, but for `_deliver`.

    def _run(self) -> None:
        engine, ended = self.llm.engine, time.perf_counter()
        try:
            while not self._closing:
                idle = not engine.has_work
                with self._wake:
                    while idle and not self._inbox and not self._closing:
                        self._wake.wait()
                with self.llm.shared.turn():
                    while self._inbox:
                        self._inbox.popleft()()
                    if engine.has_work:
                        self.gap_seconds += 0.0 if idle else time.perf_counter() - ended
                        self._step()
                        ended = time.perf_counter()
        finally:
            self._fail(Ending())

    def _step(self) -> None:
        try:
            touched = self.llm.shared.step()
        except Exception:
            log.exception("A step failed, and the requests under way with it.")
            self.failures += 1
            self._fail(EngineFailed())
            return
        self.failures = 0
        now = time.perf_counter()
        found = [(live.job, self._delta(live, now)) for r in touched if (live := self._live.get(r))]
        if found:
            self._loop.call_soon_threadsafe(self._deliver, found)

    def _add(self, job: Job, prompts: Sequence[Sequence[int]], params: SamplingParams, salt: bytes) -> None:
        if not self.llm.config.enable_prefix_caching:  # the outputs of one job share all the same
            salt = f"job-{next(self._numbers)}".encode()
        try:
            for p, ids in enumerate(prompts):
                for i in range(params.n):
                    request = self.llm.engine.add(ids, params, i, salt)
                    self._live[request] = _Live(job, p * params.n + i, request)
        except Exception:
            log.exception("A request could not be queued.")
            self._abort(job)
            self._loop.call_soon_threadsafe(self._deliver, [(job, EngineFailed())])

    def _abort(self, job: Job) -> None:
        for request in [r for r, live in self._live.items() if live.job is job]:
            del self._live[request]
            self.llm.engine.abort(request)

    def _fail(self, error: EngineFailed) -> None:
        """Tell all jobs that nothing comes any more."""
        jobs = {live.job for live in self._live.values()}
        for request in self._live:
            self.llm.engine.abort(request)
        self._live.clear()
        if jobs:
            self._loop.call_soon_threadsafe(self._deliver, [(job, error) for job in jobs])

    def _delta(self, live: _Live, now: float) -> Delta:
        """What is new of an output that a step touched."""
        request, stats, job = live.request, live.request.stats, live.job
        if live.num_tokens:
            self.on_tokens(now - live.last, stats.num_tokens - live.num_tokens)
        live.last, live.num_tokens = now, stats.num_tokens
        pieces = request.new_pieces() if job.streams else []
        first, live.num_sent = live.num_sent, min(live.num_sent + len(pieces), len(request.output_ids))
        logprobs = request.logprobs[first : live.num_sent] if job.streams else []
        counts = {name: drafted for name, (_, drafted, _) in stats.by_drafter.items()}
        drafter = next((name for name in counts if counts[name] != live.drafted.get(name)), "")
        drafted = sum(counts.values()) - sum(live.drafted.values())
        accepted = stats.num_accepted - live.accepted
        live.drafted, live.accepted = counts, stats.num_accepted
        rejected, done = self._rejected(live) if job.streams else [], None
        if request.is_finished:
            done = Completion.of(request, live.index)
            del self._live[request]
            self.on_done(done, len(request.prompt_ids))
        return Delta(live.index, pieces, logprobs, drafted, accepted, drafter, rejected, done)

    def _rejected(self, live: _Live) -> list[str]:
        """The guesses that were struck out since the last call, in a traced engine."""
        if live.request.record is None:
            return []
        steps = live.request.record.steps[live.num_steps :]
        live.num_steps += len(steps)
        text_of = self.llm.tokenizer.text_of
        return [
            text_of(d) for s in steps for i, d in enumerate(s.drafts[: s.verified], 1) if i not in s.accepted
        ]

    def _deliver(self, found: Sequence[tuple[Job, Delta | Exception]]) -> None:
        """In the event loop: hand over what a step gave."""
        for job, delta in found:
            over = job.left if isinstance(delta, Exception) else int(delta.done is not None)
            if not job.left:
                continue  # aborted meanwhile
            job.left -= over
            self.num_outputs -= over
            self._ends.extend([time.perf_counter()] * over)
            job.put(delta)
