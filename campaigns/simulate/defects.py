"""Realistic defects that the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import nanospec.device.step
from nanospec.device.messages import Admission
from nanospec.engine.blocks import BlockPool
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan, Scheduler
from nanospec.kernels.speculation.verify import Verdict
from nanospec.kernels.table import Table
from nanospec.outputs import Piece
from nanospec.text.tokenizer import Detokenizer, OutputText

Defect = Callable[[], AbstractContextManager[Any]]


def _after(target: type, name: str, more: Callable[..., Any]) -> Defect:
    """Patch a method to call `more(result, self, *args)` afterwards, whose result replaces its own."""
    method = getattr(target, name)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        other = more(result, self, *args)
        return result if other is None else other

    return lambda: mock.patch.object(target, name, changed)


def _after_write_row(more: Callable[..., None]) -> Defect:
    """Patch `write_row` to call `more` afterwards."""
    write_row = nanospec.device.worker.write_row
    return _replace(nanospec.device.worker, "write_row", lambda *args: more(write_row(*args), *args))


def _replace(target: Any, name: str, other: Callable[..., Any]) -> Defect:
    return lambda: mock.patch.object(target, name, other)


def _allocate_keeping_hashes(pool: BlockPool, count: int) -> list[int] | None:
    with mock.patch.object(pool, "forget"):
        return ALLOCATE(pool, count)


def _skip_one_block(_: None, scheduler: Scheduler, request: Request, cached: list[int]) -> None:
    request.num_computed = min(request.num_computed + scheduler.block_size, request.num_tokens - 1)


def _register_early(_: None, scheduler: Scheduler, request: Request) -> None:
    """Register a block whose last token is not computed yet."""
    i = request.num_registered
    if request.num_tokens - 1 > request.num_computed and len(request.hashes(scheduler.block_size)) > i:
        scheduler.pool.register(request.blocks[i], request.hashes(scheduler.block_size)[i])


def _accept_last_draft(targets: Any, batch: Any, table: Any, proposal: Any) -> Verdict:
    """Run `commit`, but always accept the last draft of a row."""
    if proposal.num_drafts.numel() and batch.parents is None:
        for start, count in zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True):
            if count > 1:
                targets[start + count - 2] = batch.input_ids[start + count - 1]
    return COMMIT(targets, batch, table, proposal)


def _search_latest_token(output: OutputText, new: str) -> bool:
    """Search for stop strings in the text of the latest token only."""
    output.text += new
    positions = [new.find(s) for s in output._stops if s in new]
    if not positions or output.num_tokens < output._min_tokens:
        return False
    output.text = output.text[: len(output.text) - len(new) + min(positions)]
    output.stop = next(s for s in output._stops if s in new)
    return True


def _preempt_always(scheduler: Scheduler, request: Request, plan: Plan) -> bool:
    """Preempt each request instead of decoding, so that its prompt is recomputed forever."""
    scheduler._preempt(request, plan)
    return False


def _extend_min_tokens(_: None, table: Table, request: Admission, spec: Any) -> None:
    """Forbid stop tokens for one token more than `min_tokens`."""
    end = request.num_prompt + request.params.min_tokens + 1
    table.min_len[request.row] = min(end, request.max_len)


def _flush_nothing(detokenizer: Detokenizer) -> str:
    """Drop the text that was held back."""
    detokenizer._window, detokenizer._returned = [], 0
    return ""


def _count_own_blocks(_: None, scheduler: Scheduler, request: Request, cached: list[int]) -> None:
    """Count the tokens that a preempted request had computed as cache hits."""
    if request.num_preemptions:
        request.num_cached_tokens += request.num_computed


def _disable_drafts(_: None, table: Table, request: Admission, spec: Any) -> None:
    """Disable drafts after a preemption."""
    if len(request.tokens) > request.num_prompt:
        table.max_k[request.row] = 0


def _drop_last_piece(pieces: list[Piece], request: Request) -> list[Piece]:
    return pieces[:-1] if request.is_finished and len(pieces) > 1 else pieces


def _abort_after_five(_: int, request: Request, *args: Any) -> None:
    """Abort requests after five output tokens, as if memory had run out."""
    if not request.is_finished and len(request.output_ids) >= 5:
        request.error = "Out of memory."
        request.finish("abort")


ALLOCATE, COMMIT = BlockPool.allocate, nanospec.device.step.commit
DEFECTS: dict[str, Defect] = {
    "reallocated block keeps its hash": _replace(BlockPool, "allocate", _allocate_keeping_hashes),
    "one block too many counts as cached": _after(Scheduler, "_admit", _skip_one_block),
    "block is registered too early": _after(Scheduler, "register", _register_early),
    "no slots for queued steps": _after(Scheduler, "reset", lambda _, s: setattr(s, "slots_ahead", 0)),
    "last draft is not verified": _replace(nanospec.device.step, "commit", _accept_last_draft),
    "accepted tree nodes are not moved": lambda: mock.patch.object(nanospec.device.step, "kv_move"),
    "stop string across tokens is missed": _replace(OutputText, "_append", _search_latest_token),
    "outputs are aborted without cause": _after(Request, "append", _abort_after_five),
    "interrupted step aborts no requests": _replace(
        SharedEngine, "step", lambda shared: shared.engine.step()
    ),
    "min_tokens is off by one": _after_write_row(_extend_min_tokens),
    "held-back text is lost": _replace(Detokenizer, "flush", _flush_nothing),
    "prefix cache never hits": _replace(BlockPool, "match", lambda pool, names: []),
    "no drafts after preemption": _after_write_row(_disable_drafts),
    "last request is admitted first": _replace(
        Scheduler, "add", lambda s, request: s.waiting.appendleft(request)
    ),
    "end of stream is lost": _after(Request, "new_pieces", _drop_last_piece),
    "salts are ignored": _after(Engine, "new", lambda request, *args: setattr(request, "salt", b"")),
    "preempted request counts its own blocks as cached": _after(Scheduler, "_admit", _count_own_blocks),
    "decoding request is preempted": _replace(Scheduler, "_extend", _preempt_always),
    "released blocks are lost": _replace(BlockPool, "release", lambda pool, blocks: None),
}
