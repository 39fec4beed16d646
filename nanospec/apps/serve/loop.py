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
from collections.abc import Callable, Sequence
from math import ceil

from ...config import SamplingParams
from ...engine.request import Request
from ...llm import LLM
from ...outputs import Completion
from .jobs import Delta, Ending, EngineFailed, Job, Live, QueueFull
from .logs import log

MOST_FAILURES = 3  # steps in a row, after which the engine is taken for broken
RECENT = 32  # ended outputs that tell how long others will take


class EngineLoop:
    """Runs the engine of an `LLM`, which nobody else may use meanwhile.

    All methods are the event loop's, but those that begin with an underscore.

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
        self.on_done: Callable[[Completion, Request], None] = lambda done, request: None
        self._live: dict[Request, Live] = {}
        self._numbers = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._broken: str | None = None
        self._jobs: set[Job] = set()  # accepted, and not yet told all
        self._over: EngineFailed | None = None  # what is told to all when the thread has ended
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
        return self._thread.is_alive() and self.failures < MOST_FAILURES and self.end is None

    @property
    def end(self) -> str | None:
        """Why nothing will ever be answered again: a device that the model is split among is gone, or what
        cleans up behind a failure has failed itself."""
        return self.llm.engine.worker.failure or self._broken

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        streams: bool = False,
        salt: bytes = b"",
        arrival: float | None = None,
    ) -> Job:
        """Have prompts answered, which must have been checked. `salt` names who may share their cached
        blocks. Raises QueueFull, or ValueError if there could never be room."""
        count = len(prompts) * params.n
        if count > self.most:
            raise ValueError(f"These are {count} outputs, prompts times n, but the limit is {self.most}.")
        if self.num_outputs + count > self.most:
            raise QueueFull(self.seconds_left())
        job = Job(count, streams, time.perf_counter() if arrival is None else arrival, self.abort)
        self.num_outputs += count
        self._jobs.add(job)
        self._do(lambda: self._add(job, prompts, params, salt))
        if self._over is not None:
            self._end_with(self._over)
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
            self._jobs.discard(job)
            self._do(lambda: self._abort(job))

    def end_all(self) -> None:
        """End all jobs, as there is no more time for them."""
        self._do(lambda: self._fail(Ending()))

    def _do(self, action: Callable[[], None]) -> None:
        """Have the engine's thread do something before its next step."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _end_with(self, error: EngineFailed) -> None:
        """Nothing is answered any more: not what is under way, nor what nobody has taken from the inbox."""
        self._over = error
        self._deliver([(job, error) for job in self._jobs])

    # What follows runs in the engine's thread, but for `_deliver`.

    def _run(self) -> None:
        over: EngineFailed = Ending()
        try:
            self._serve()
        except BaseException:
            log.exception("The engine failed while it cleaned up behind a failure.")
            self._broken = "The engine could not go on behind a failure, which the log has; start it again."
            over = EngineFailed()
        self._loop.call_soon_threadsafe(self._end_with, over)

    def _serve(self) -> None:
        ended = time.perf_counter()
        while not self._closing:
            idle = not self.llm.engine.has_work
            with self._wake:
                while idle and not self._inbox and not self._closing:
                    self._wake.wait()
            with self.llm.shared.turn() as engine:
                while self._inbox:
                    self._guard(self._inbox.popleft())
                if engine.has_work:
                    self.gap_seconds += 0.0 if idle else time.perf_counter() - ended
                    self._guard(self._step)
                    ended = time.perf_counter()
        self._fail(Ending())

    def _guard(self, action: Callable[[], None]) -> None:
        """Whatever happens, this thread lives on; what was under way does not."""
        try:
            action()
        except BaseException:  # a panic of a library in Rust is no Exception
            if self.end is None:  # else whoever ends the server says why
                log.exception("A step failed, and the requests under way with it.")
            self.failures += 1
            self._fail(EngineFailed())

    def _step(self) -> None:
        touched = self.llm.shared.step()
        self.failures, now = 0, time.perf_counter()
        found: list[tuple[Job, Delta]] = []
        try:
            for request in touched:
                if (live := self._live.get(request)) is not None:
                    found.append((live.job, self._told(live, now)))
        finally:  # whatever happens to one, the others are told
            if found:
                self._loop.call_soon_threadsafe(self._deliver, found)

    def _add(self, job: Job, prompts: Sequence[Sequence[int]], params: SamplingParams, salt: bytes) -> None:
        if not self.llm.config.enable_prefix_caching:  # the outputs of one job share all the same
            salt = f"job-{next(self._numbers)}".encode()
        try:
            for p, ids in enumerate(prompts):
                for i in range(params.n):
                    request = self.llm.engine.new(ids, params, i, salt)
                    request.arrival_time = job.arrival
                    self._live[request] = Live(job, p * params.n + i, request)
                    self.llm.engine.queue(request)
        except BaseException:  # as in `_guard`
            log.exception("A request could not be queued.")
            self._loop.call_soon_threadsafe(self._deliver, [(job, EngineFailed())])
            self._abort(job)

    def _abort(self, job: Job) -> None:
        for request in [r for r, live in self._live.items() if live.job is job]:
            del self._live[request]
            self.llm.engine.abort(request)

    def _fail(self, error: EngineFailed) -> None:
        """Tell all jobs that nothing comes any more."""
        jobs = {live.job for live in self._live.values()}
        self.llm.engine.abort_all()  # whatever failed may have left it inconsistent
        self._live.clear()
        if jobs:
            self._loop.call_soon_threadsafe(self._deliver, [(job, error) for job in jobs])

    def _told(self, live: Live, now: float) -> Delta:
        """What is new of an output that a step touched."""
        stats = live.request.stats
        if live.num_tokens:
            self.on_tokens(now - live.last, stats.num_tokens - live.num_tokens)
        live.last, live.num_tokens = now, stats.num_tokens
        delta = live.delta(self.llm.tokenizer)
        if delta.done is not None:
            self.on_done(delta.done, live.request)
            del self._live[live.request]
        return delta

    def _deliver(self, found: Sequence[tuple[Job, Delta | Exception]]) -> None:
        """In the event loop: hand over what a step gave."""
        for job, delta in found:
            over = job.left if isinstance(delta, Exception) else int(delta.done is not None)
            if not job.left:
                continue  # aborted meanwhile
            job.left -= over
            self.num_outputs -= over
            self._ends.extend([time.perf_counter()] * over)
            if not job.left:
                self._jobs.discard(job)
            job.put(delta)
