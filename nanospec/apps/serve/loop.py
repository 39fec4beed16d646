"""Runs the engine in its own thread, for use from asyncio.

    job = engine_loop.submit(prompts, params, streams=True)    in the event loop
    async for delta in job: ...                                deltas of each step until all outputs finish
    job.abort()                                                frees its blocks before the next step

All jobs are batched. The thread applies submissions and aborts, runs one step, and passes the deltas of
all jobs to the event loop at once. If a step raises, the running jobs fail, and later ones are served.
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
from .jobs import ENDED, FAILED, Delta, Job, JobFailed, RunningOutput
from .logs import log

MAX_FAILURES = 3  # consecutive failed steps after which the engine counts as broken


class EngineLoop:
    """Runs the engine of an `LLM`, which must not be used otherwise in the meantime.

    Attributes:
        num_outputs: number of accepted, unfinished outputs; at most `limit`.
        gap_seconds: time between steps while there was work; host time within a step is part of the stages.
        failures: number of consecutive steps that raised.
        on_tokens, on_done: callbacks in the engine thread, with the seconds since an output's last tokens and
            the number of new ones, and with each finished output and its request.
    """

    on_tokens: Callable[[float, int], None] = staticmethod(lambda seconds, count: None)
    on_done: Callable[[Completion, Request], None] = staticmethod(lambda done, request: None)

    def __init__(self, llm: LLM, limit: int) -> None:
        self.llm, self.limit = llm, limit
        self.num_outputs, self.failures, self.gap_seconds = 0, 0, 0.0
        self._live: dict[Request, RunningOutput] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._enqueue = self._inbox.put  # schedules a call in the engine thread before its next step
        self._closing = False
        self._broken: str | None = None
        self._jobs: set[Job] = set()  # accepted and unfinished
        self._final_error: JobFailed | None = None  # of all jobs once the thread has ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread unless it was started. Must be called in the event loop that submits jobs."""
        if self._thread.ident is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

    async def stop(self) -> None:
        """Fail the running jobs and join the thread."""
        self._closing = True
        self._enqueue(lambda: None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered: the thread runs, and some of its latest steps succeeded."""
        return self._thread.is_alive() and self.failures < MAX_FAILURES and self.fatal_error is None

    @property
    def fatal_error(self) -> str | None:
        """Why the engine cannot continue: a rank of a tensor-parallel model is lost, or cleaning up after a
        failure failed. None while it can."""
        return self.llm.engine.worker.failure or self._broken

    def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, streams: bool = False, salt: bytes = b""
    ) -> Job:
        """Queue prompts that have passed `Engine.check`. Only jobs with the same `salt` share cached blocks.
        Raises asyncio.QueueFull, or ValueError if the job alone exceeds the limit."""
        count = len(prompts) * params.n
        if count > self.limit:
            raise ValueError(f"The request has {count} outputs (prompts x n), but the limit is {self.limit}.")
        self.check_capacity(count)
        job = Job(count, streams, self.abort)
        self.num_outputs += count
        self._jobs.add(job)
        self._enqueue(lambda: self._add(job, prompts, params, salt))
        if self._final_error is not None:
            self._end_with(self._final_error)
        return job

    def check_capacity(self, count: int = 1) -> None:
        """Raise asyncio.QueueFull unless `count` more outputs can be accepted."""
        if self.num_outputs + count > self.limit:
            raise asyncio.QueueFull

    def abort(self, job: Job) -> None:
        """Abort a job; see `Job.abort`."""
        if job.left:
            self.num_outputs -= job.left
            job.left = 0
            self._jobs.discard(job)
            self._enqueue(lambda: self._abort(job))

    def end_all(self) -> None:
        """Fail all running jobs, because the time to finish them at shutdown is over."""
        self._enqueue(lambda: self._fail(JobFailed(ENDED, 503)))

    def _end_with(self, error: JobFailed) -> None:
        """Fail all jobs, including those still in the inbox, and those submitted later."""
        self._final_error = error
        self._deliver([(job, error) for job in self._jobs])

    def _deliver(self, deltas: Sequence[tuple[Job, Delta | JobFailed]]) -> None:
        """Pass the deltas of a step to their jobs, except jobs that were aborted in the meantime."""
        for job, delta in deltas:
            if job.left:
                ended = job.left if isinstance(delta, JobFailed) else int(delta.done is not None)
                job.left -= ended
                self.num_outputs -= ended
                if not job.left:
                    self._jobs.discard(job)
                job.put(delta)

    # The methods below run in the engine thread.

    def _run(self) -> None:
        error = JobFailed(ENDED, 503)
        try:
            self._run_steps()
        except BaseException:
            log.exception("The engine failed while cleaning up after a failure.")
            self._broken = "The engine could not recover from a failure; see the log, and restart the server."
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
        """Call `action`. If it raises, fail the running jobs but keep the thread alive."""
        try:
            action()
        except BaseException:  # the panic of a Rust library is not an Exception
            if self.fatal_error is None:  # otherwise it is logged when the server exits
                log.exception("A step failed; the running requests were aborted.")
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
        finally:  # an error in one request must not hold back the deltas of others
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
                    self._live[request] = RunningOutput(job, p * params.n + i, request)
                    self.llm.engine.scheduler.add(request)
        except BaseException:  # as in `_guard`
            log.exception("Failed to queue a request.")
            self._send([(job, JobFailed(FAILED))])
            self._abort(job)

    def _abort(self, job: Job) -> None:
        for request in [r for r, live in self._live.items() if live.job is job]:
            del self._live[request]
            self.llm.engine.abort(request)

    def _fail(self, error: JobFailed) -> None:
        """Abort all requests and fail their jobs."""
        jobs = {live.job for live in self._live.values()}
        self.llm.engine.abort_all()  # also resets the engine, which a failure may have left inconsistent
        self._live.clear()
        self._send([(job, error) for job in jobs])
