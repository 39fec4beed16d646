"""The engine in a thread of its own, and what asyncio asks of it.

    job = engine_loop.submit(prompts, params, streams=True)    in the event loop
    async for delta in job: ...                                what each step gave, until all outputs are done
    job.abort()                                                its blocks are free before the next step

All jobs run as one batch. The thread takes what was submitted and aborted, runs one step, and hands over what
it gave in one go. A step that raises ends the jobs under way with an error, and the next ones are served.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ...config import SamplingParams
from ...engine.request import Request
from ...llm import LLM
from ...outputs import Completion
from .jobs import ENDED, FAILED, Delta, Job, JobFailed, Live
from .logs import log

MAX_FAILURES = 3  # steps in a row, after which the engine is taken for broken


class QueueFull(Exception):
    """Too many outputs wait."""


class EngineLoop:
    """Runs the engine of an `LLM`, which nothing else may use meanwhile.

    Attributes:
        num_outputs: accepted and not yet ended; at most `limit`.
        gap_seconds: between steps while there was work; the host's own part of a step is in the stages.
        failures: steps that raised, since the latest one that did not.
        on_tokens, on_done: called in the engine's thread with the seconds since an output's last tokens and
            the number of new ones, and with each ended output.
    """

    on_tokens: Callable[[float, int], None] = staticmethod(lambda seconds, count: None)
    on_done: Callable[[Completion, Request], None] = staticmethod(lambda done, request: None)

    def __init__(self, llm: LLM, limit: int) -> None:
        self.llm, self.limit = llm, limit
        self.num_outputs, self.failures, self.gap_seconds = 0, 0, 0.0
        self._live: dict[Request, Live] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._enqueue = self._inbox.put  # has the engine's thread do something before its next step
        self._closing = False
        self._broken: str | None = None
        self._jobs: set[Job] = set()  # accepted, and not ended
        self._final_error: JobFailed | None = None  # for all jobs when the thread has ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin, unless it has. Called in the event loop that will submit."""
        if self._thread.ident is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

    async def stop(self) -> None:
        """End what runs, and the thread."""
        self._closing = True
        self._enqueue(lambda: None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered: the thread runs, and not all of its latest steps failed."""
        return self._thread.is_alive() and self.failures < MAX_FAILURES and self.fatal_error is None

    @property
    def fatal_error(self) -> str | None:
        """Why nothing will be answered again: a device that the model is split among is gone, or cleaning up
        behind a failure has failed."""
        return self.llm.engine.worker.failure or self._broken

    def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, streams: bool = False, salt: bytes = b""
    ) -> Job:
        """Have prompts answered that have passed `Engine.check`. Jobs of equal `salt` share cached blocks.
        Raises QueueFull, or ValueError if there could never be room."""
        count = len(prompts) * params.n
        if count > self.limit:
            raise ValueError(f"These are {count} outputs, prompts times n, but the limit is {self.limit}.")
        self.check_room(count)
        job = Job(count, streams, self.abort)
        self.num_outputs += count
        self._jobs.add(job)
        self._enqueue(lambda: self._add(job, prompts, params, salt))
        if self._final_error is not None:
            self._end_with(self._final_error)
        return job

    def check_room(self, count: int = 1) -> None:
        """Raise QueueFull unless there is room for so many outputs."""
        if self.num_outputs + count > self.limit:
            raise QueueFull

    def abort(self, job: Job) -> None:
        """End a job; see `Job.abort`."""
        if job.left:
            self.num_outputs -= job.left
            job.left = 0
            self._jobs.discard(job)
            self._enqueue(lambda: self._abort(job))

    def end_all(self) -> None:
        """End all jobs, as there is no more time for them."""
        self._enqueue(lambda: self._fail(JobFailed(ENDED, 503)))

    def _end_with(self, error: JobFailed) -> None:
        """Tell all jobs that nothing is answered any more, also those that are still in the inbox."""
        self._final_error = error
        self._deliver([(job, error) for job in self._jobs])

    def _deliver(self, deltas: Sequence[tuple[Job, Delta | JobFailed]]) -> None:
        """Hand over what a step gave to the jobs that were not aborted meanwhile."""
        for job, delta in deltas:
            if job.left:
                ended = job.left if isinstance(delta, JobFailed) else int(delta.done is not None)
                job.left -= ended
                self.num_outputs -= ended
                if not job.left:
                    self._jobs.discard(job)
                job.put(delta)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        error = JobFailed(ENDED, 503)
        try:
            self._run_steps()
        except BaseException:
            log.exception("The engine failed while it cleaned up behind a failure.")
            self._broken = "The engine could not go on behind a failure, which the log has; start it again."
            error = JobFailed(FAILED)
        self._loop.call_soon_threadsafe(self._end_with, error)

    def _run_steps(self) -> None:
        ended = time.perf_counter()
        while not self._closing:
            idle = not self.llm.engine.has_work
            first = [self._inbox.get()] if idle else []
            with self.llm.shared.turn() as engine:
                for action in first:
                    self._guard(action)
                while not self._inbox.empty():
                    self._guard(self._inbox.get())
                if engine.has_work:
                    self.gap_seconds += 0.0 if idle else time.perf_counter() - ended
                    self._guard(self._step)
                    ended = time.perf_counter()
        self._fail(JobFailed(ENDED, 503))

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something; if it raises, end what is under way, and not this thread."""
        try:
            action()
        except BaseException:  # a panic of a library in Rust is no Exception
            if self.fatal_error is None:  # else the log says why when the server ends
                log.exception("A step failed, and the requests under way with it.")
            self.failures += 1
            self._fail(JobFailed(FAILED))

    def _step(self) -> None:
        requests = self.llm.shared.step()
        self.failures, now = 0, time.perf_counter()
        deltas: list[tuple[Job, Delta | JobFailed]] = []
        try:
            for live in filter(None, map(self._live.get, requests)):
                if live.num_tokens:
                    self.on_tokens(now - live.last, live.request.stats.num_tokens - live.num_tokens)
                live.last, live.num_tokens = now, live.request.stats.num_tokens
                if (delta := live.delta(self.llm.tokenizer.text_of)) is not None:
                    deltas.append((live.job, delta))
                    if delta.done is not None:
                        self.on_done(delta.done, live.request)
                        del self._live[live.request]
        finally:  # an error of one request does not hold back the others' deltas
            self._send(deltas)

    def _send(self, deltas: Sequence[tuple[Job, Delta | JobFailed]]) -> None:
        if deltas:
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _add(self, job: Job, prompts: Sequence[list[int]], params: SamplingParams, salt: bytes) -> None:
        try:
            for p, ids in enumerate(prompts):
                for i in range(params.n):
                    request = self.llm.engine.new(ids, params, i, salt)
                    request.arrival_time = job.arrival
                    self._live[request] = Live(job, p * params.n + i, request)
                    self.llm.engine.scheduler.add(request)
        except BaseException:  # as in `_guard`
            log.exception("A request could not be queued.")
            self._send([(job, JobFailed(FAILED))])
            self._abort(job)

    def _abort(self, job: Job) -> None:
        for request in [r for r, live in self._live.items() if live.job is job]:
            del self._live[request]
            self.llm.engine.abort(request)

    def _fail(self, error: JobFailed) -> None:
        """End everything, and tell all jobs that nothing more comes."""
        jobs = {live.job for live in self._live.values()}
        self.llm.engine.abort_all()  # a failure may have left it inconsistent
        self._live.clear()
        self._send([(job, error) for job in jobs])
