"""What one client waits for, and what the engine hands over for it after each step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...engine.request import Logprob, Piece, Request
from ...outputs import Completion
from ...text.tokenizer import Tokenizer


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
        logprobs: of these tokens, as far as they are of the text, if they were asked for.
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

    def joined(self, later: Delta) -> Delta:
        """Both as one."""
        return Delta(
            self.choice,
            [*self.pieces, *later.pieces],
            [*self.logprobs, *later.logprobs],
            self.drafted + later.drafted,
            self.accepted + later.accepted,
            later.drafter or self.drafter,
            [*self.rejected, *later.rejected],
            later.done,
        )


class Job:
    """The outputs that one client waits for: `n` of each of its prompts, in this order.

    Attributes:
        left: how many have not ended, as far as the event loop knows; 0 when the job was aborted.
        arrival: when it was asked for, on the clock of `time.perf_counter`.
        abort: ends what has not ended; nothing more comes.
    """

    def __init__(self, num_outputs: int, streams: bool, arrival: float, abort: Callable[[Job], None]) -> None:
        self.num_outputs = self.left = num_outputs
        self.streams, self.arrival = streams, arrival
        self.abort = lambda: abort(self)
        self._deltas: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delta | None]:
        """Everything that its outputs get; None where there is nothing, and somebody wants to be told. Raises
        EngineFailed."""
        left = self.num_outputs
        while left:
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            left -= delta is not None and delta.done is not None
            yield delta

    def put(self, delta: Delta | Exception | None) -> None:
        self._deltas.put_nowait(delta)


@dataclass(eq=False)
class Live:
    """An output under way, in the engine's thread: what of it was told already."""

    job: Job
    choice: int
    request: Request
    num_sent: int = 0  # tokens whose pieces were handed over
    num_tokens: int = 0  # and what else was told of its steps
    num_steps: int = 0
    accepted: int = 0
    drafted: dict[str, int] = field(default_factory=dict)  # by drafter
    last: float = field(default_factory=time.perf_counter)

    def delta(self, tokenizer: Tokenizer) -> Delta:
        """What is new since the last call."""
        request, stats, streams = self.request, self.request.stats, self.job.streams
        pieces = request.new_pieces() if streams else []
        first, self.num_sent = self.num_sent, min(self.num_sent + len(pieces), len(request.output_ids))
        counts = {name: drafted for name, (_, drafted, _) in stats.by_drafter.items()}
        drafter = next((name for name in counts if counts[name] != self.drafted.get(name)), "")
        drafted, self.drafted = sum(counts.values()) - sum(self.drafted.values()), counts
        accepted, self.accepted = stats.num_accepted - self.accepted, stats.num_accepted
        return Delta(
            self.choice,
            pieces,
            request.logprobs[first : min(self.num_sent, request.num_text_tokens)] if streams else [],
            drafted,
            accepted,
            drafter,
            self._rejected(tokenizer) if streams else [],
            Completion.of(request, self.choice) if request.is_finished else None,
        )

    def _rejected(self, tokenizer: Tokenizer) -> list[str]:
        """The guesses that were struck out since the last call, in a traced engine."""
        record = self.request.kept
        steps = [] if record is None else record.steps[self.num_steps :]
        self.num_steps += len(steps)
        struck_out = [
            d for s in steps for i, d in enumerate(s.drafts[: s.verified], 1) if i not in s.accepted
        ]
        return list(map(tokenizer.text_of, struck_out))
