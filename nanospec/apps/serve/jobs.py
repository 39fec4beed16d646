"""A job: the outputs of one HTTP request, and the deltas that the engine thread sends after each step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...engine.request import Request
from ...outputs import Completion, Logprob, Piece

QUIET_AFTER = 15.0  # seconds without a delta after which iterating over a job yields None
FAILED = "The engine failed while processing this request; try again."
ENDED = "The engine was shut down before this request was finished."


class JobFailed(RuntimeError):
    """A job was not finished. Holds the reason, one sentence, and the HTTP status to report."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class Delta(NamedTuple):
    """The update of one output of a job since its last delta."""

    choice: int  # index of the output in the job
    pieces: list[Piece]  # texts of the new tokens; empty unless the job streams
    logprobs: list[dict[int, Logprob]]  # of those new tokens that are part of the text
    speculation: dict[str, Any]  # draft statistics, and the texts of rejected drafts if the engine is traced
    done: Completion | None  # the whole output, if it has finished


class Job:
    """The outputs of one HTTP request: `n` for each prompt, in order.

    Attributes:
        left: number of unfinished outputs, as seen by the event loop; 0 after an abort.
        abort: aborts the unfinished outputs; no more deltas follow.
    """

    def __init__(self, num_outputs: int, streams: bool, abort: Callable[[Job], None]) -> None:
        self.num_outputs = self.left = num_outputs
        self.streams, self.arrival = streams, time.perf_counter()
        self.abort = lambda: abort(self)
        self._deltas: asyncio.Queue[Delta | JobFailed] = asyncio.Queue()
        self.put = self._deltas.put_nowait

    async def __aiter__(self) -> AsyncIterator[Delta | None]:
        """Yield deltas until all outputs have finished; yield None while there is none. Raises JobFailed."""
        left = self.num_outputs
        while left:
            try:
                delta = await asyncio.wait_for(self._deltas.get(), QUIET_AFTER)
            except asyncio.TimeoutError:
                yield None
                continue
            if isinstance(delta, JobFailed):
                raise delta
            left -= delta.done is not None
            yield delta


@dataclass(eq=False)
class RunningOutput:
    """A running output, used by the engine thread, and how much of it has been sent."""

    job: Job
    choice: int
    request: Request
    pieces: list[Piece] = field(default_factory=list)  # not sent yet
    num_sent: int = 0  # tokens
    num_tokens: int = 0
    num_steps: int = 0
    accepted: int = 0
    drafted: dict[str, int] = field(default_factory=dict)  # by drafter
    last: float = field(default_factory=time.perf_counter)

    def delta(self, text_of: Callable[[int], str]) -> Delta | None:
        """Return what is new, or None if there is no new text and the output has not finished."""
        request, streams = self.request, self.job.streams
        self.pieces += request.new_pieces() if streams else []
        if not request.is_finished and not any(piece.text for piece in self.pieces):
            return None
        pieces, self.pieces = self.pieces, []
        first, self.num_sent = self.num_sent, min(self.num_sent + len(pieces), len(request.output_ids))
        return Delta(
            self.choice,
            pieces,
            request.logprobs[first : min(self.num_sent, request.output.num_text_tokens)] if streams else [],
            self._speculation(text_of) if streams else {},
            request.completion(self.choice) if request.is_finished else None,
        )

    def _speculation(self, text_of: Callable[[int], str]) -> dict[str, Any]:
        stats, record = self.request.stats, self.request.extension_data
        drafted = {name: drafted for name, (_, drafted, _) in stats.by_drafter.items()}
        steps = [] if record is None else record.steps[self.num_steps :]
        rejected = [d for s in steps for i, d in enumerate(s.drafts[: s.verified], 1) if i not in s.accepted]
        figures = {
            "drafted": sum(drafted.values()) - sum(self.drafted.values()),
            "accepted": stats.num_accepted - self.accepted,
            "drafter": next((name for name in drafted if drafted[name] != self.drafted.get(name)), ""),
            "rejected": list(map(text_of, rejected)),
        }
        self.num_steps += len(steps)
        self.drafted, self.accepted = drafted, stats.num_accepted
        return figures
