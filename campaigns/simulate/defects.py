"""Defects to plant, each small and as somebody might make it: a simulation must find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import nanospec.device.step
from nanospec.device.orders import Admission
from nanospec.device.worker import Worker
from nanospec.engine.blocks import BlockPool
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan, Scheduler
from nanospec.kernels.batch import Chunk
from nanospec.kernels.speculation.verify import Verdict
from nanospec.kernels.table import Table
from nanospec.outputs import Piece
from nanospec.text.tokenizer import Detokenizer, OutputText

Defect = Callable[[], AbstractContextManager[Any]]


def _after(kind: type, name: str, more: Callable[..., Any]) -> Defect:
    """A method that does `more`, with its own result first, behind what it does."""
    method = getattr(kind, name)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        other = more(result, self, *args)
        return result if other is None else other

    return lambda: mock.patch.object(kind, name, changed)


def _row(more: Callable[..., None]) -> Defect:
    """A row that is written, and then `more`."""
    write_row = nanospec.device.worker.write_row
    return _instead(nanospec.device.worker, "write_row", lambda *args: more(write_row(*args), *args))


def _instead(kind: Any, name: str, other: Callable[..., Any]) -> Defect:
    return lambda: mock.patch.object(kind, name, other)


def _keeps_names(pool: BlockPool, count: int) -> list[int] | None:
    """`BlockPool.allocate` that does not forget what a block held."""
    if count > len(pool.free):
        return None
    blocks = [pool.free.popitem(last=False)[0] for _ in range(count)]
    for block in blocks:
        pool._references[block] = 1
    return blocks


def _one_cached(_: None, scheduler: Scheduler, request: Request, cached: list[int]) -> None:
    request.num_computed = min(request.num_computed + scheduler.block_size, request.num_tokens - 1)


def _one_more(_: None, scheduler: Scheduler, request: Request) -> None:
    """Names a block whose last token is not computed yet."""
    i = request.num_registered
    if request.num_tokens - 1 > request.num_computed and len(request.hashes(scheduler.block_size)) > i:
        scheduler.pool.register(request.blocks[i], request.hashes(scheduler.block_size)[i])


def _short_of_slots(_: None, scheduler: Scheduler, *args: Any) -> None:
    scheduler.slots_ahead = scheduler.lookahead  # as if nothing were queued ahead


def _commit(targets: Any, batch: Any, table: Any, proposal: Any) -> Verdict:
    """Verification that takes each row's last draft unseen."""
    if proposal.num_drafts.numel() and batch.parents is None:
        for start, count in zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True):
            if count > 1:
                targets[start + count - 2] = batch.input_ids[start + count - 1]
    return COMMIT(targets, batch, table, proposal)


def _prefill(worker: Worker, chunks: Sequence[Chunk]) -> None:
    """Computes all but the last token of a piece of a prompt."""
    PREFILL(worker, [Chunk(row, start, max(count - 1, 1)) for row, start, count in chunks])


def _late_stop(output: OutputText, new: str) -> bool:
    """Stop strings are looked for in the text of the latest token alone."""
    output.text += new
    found = [new.find(s) for s in output._stops if s in new]
    if not found or output.num_tokens < output._min_tokens:
        return False
    output.text = output.text[: len(output.text) - len(new) + min(found)]
    output.stop = next(s for s in output._stops if s in new)
    return True


def _gives_way(scheduler: Scheduler, request: Request, plan: Plan) -> bool:
    """Who would decode is preempted instead, and computes its prompt anew, again and again."""
    scheduler._preempt(request, plan)
    return False


def _uncounted(_: None, engine: Engine, *args: Any) -> None:
    engine.metrics.num_aborted = 0


def _barred_longer(_: None, table: Table, request: Admission, spec: Any) -> None:
    """Stop tokens are barred for one token more than `min_tokens`."""
    end = request.num_prompt + request.params.min_tokens + 1
    table.min_len[request.row] = min(end, request.max_len)


def _all_of_them(_: None, table: Table, request: Admission, spec: Any) -> None:
    table.top_p[request.row] = 1.0


def _flush(detokenizer: Detokenizer) -> str:
    """What was held back is lost."""
    detokenizer._window, detokenizer._returned = [], 0
    return ""


def _finds_itself(_: None, scheduler: Scheduler, request: Request, cached: list[int]) -> None:
    """What a preempted request has computed counts as found in the cache."""
    if request.num_preemptions:
        request.num_cached_tokens += request.num_computed


def _silent(_: None, table: Table, request: Admission, spec: Any) -> None:
    """No guesses after a preemption."""
    if len(request.tokens) > request.num_prompt:
        table.limit[request.row] = 0


def _last_first(scheduler: Scheduler, request: Request) -> None:
    scheduler.waiting.appendleft(request)


def _short_first(scheduler: Scheduler, plan: Plan) -> tuple[Request, list[int]] | None:
    """Who fits is admitted, whoever waits before it."""
    if scheduler._free_rows and not plan.preempted:
        for request in scheduler.waiting:
            names = request.hashes(scheduler.block_size)[: (request.num_tokens - 1) // scheduler.block_size]
            cached = scheduler.pool.match(names)
            if scheduler._blocks_ahead(request) - len(cached) <= scheduler.pool.num_available(cached):
                return request, cached
    return None


def _no_panic(shared: SharedEngine, action: Callable[[], Any]) -> Any:
    """A step that panics ends nothing, as it raises no Exception."""
    try:
        return action()
    except (Exception, KeyboardInterrupt):
        shared.engine.abort_all()
        raise


def _short_stream(pieces: list[Piece], request: Request) -> list[Piece]:
    return pieces[:-1] if request.is_finished and len(pieces) > 1 else pieces


def _carries_on(shared: SharedEngine) -> list[Request]:
    """A step that was interrupted ends nothing."""
    return shared.engine.step()


def _cut_short(_: int, request: Request, *args: Any) -> None:
    """Outputs of five tokens are aborted as if memory had run out."""
    if not request.is_finished and len(request.output_ids) >= 5:
        request.error = "Memory ran out."
        request.finish("abort")


def _out_of_memory(_: Any, engine: Engine) -> None:
    if len(engine.scheduler.running) == 2:
        raise MemoryError


@contextmanager
def _without(module: Any, name: str) -> Iterator[None]:
    with mock.patch.object(module, name):
        yield


COMMIT, PREFILL = nanospec.device.step.commit, Worker.prefill
DEFECTS: dict[str, Defect] = {
    "a block keeps its name when it is given to another": _instead(BlockPool, "allocate", _keeps_names),
    "a block too many is taken for cached": _after(Scheduler, "_admit", _one_cached),
    "a block is named too early": _after(Scheduler, "register", _one_more),
    "no slots for what is queued": _after(Scheduler, "reset", lambda _, s: setattr(s, "slots_ahead", 0)),
    "too few slots with lag": _after(Scheduler, "__init__", _short_of_slots),
    "the last draft is not verified": _instead(nanospec.device.step, "commit", _commit),
    "accepted nodes of a tree are not moved": lambda: _without(nanospec.device.step, "kv_move"),
    "a stop string across tokens is missed": _instead(OutputText, "_append", _late_stop),
    "outputs are aborted without a cause": _after(Request, "append", _cut_short),
    "steps of two fail": _after(Engine, "step", _out_of_memory),
    "an interrupted step ends nothing": _instead(SharedEngine, "step", _carries_on),
    "the end of a chunk is not computed": _instead(Worker, "prefill", _prefill),
    "min_tokens is off by one": _row(_barred_longer),
    "top_p is not told": _row(_all_of_them),
    "what a text has held back is lost": _instead(Detokenizer, "flush", _flush),
    "the prefix cache never hits": _instead(BlockPool, "match", lambda pool, names: []),
    "no guesses after a preemption": _row(_silent),
    "who comes last is admitted first": _instead(Scheduler, "add", _last_first),
    "who is short is admitted first": _instead(Scheduler, "_next", _short_first),
    "a panic ends nothing": _instead(SharedEngine, "_guarded", _no_panic),
    "the last of a stream is lost": _after(Request, "new_pieces", _short_stream),
    "salts are ignored": _after(Engine, "new", lambda request, *args: setattr(request, "salt", b"")),
    "a preempted request finds itself": _after(Scheduler, "_admit", _finds_itself),
    "an abort is not counted": _after(Engine, "abort", _uncounted),
    "who would decode is preempted": _instead(Scheduler, "_extend", _gives_way),
    "released blocks are lost": _instead(BlockPool, "release", lambda pool, blocks: None),
}
