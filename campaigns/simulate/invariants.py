"""Invariants of an engine's state after every step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from campaigns.simulate.model import Mock, entries_of
from nanospec.engine.blocks import block_hash
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.outputs import Metrics


class BlockTexts:
    """Maps the block hashes of all requests so far to the tokens that they cover."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.text_of: dict[bytes, list[int]] = {}
        self._done: dict[Request, tuple[int, bytes]] = {}

    def learn(self, request: Request) -> None:
        size, (count, parent) = self.block_size, self._done.get(request, (0, request.salt))
        while (count + 1) * size <= request.num_tokens:
            parent = block_hash(parent, request.tokens[count * size : (count + 1) * size])
            count += 1
            self.text_of[parent] = request.tokens[: count * size]
        self._done[request] = count, parent


def check(engine: Engine, model: Mock, block_texts: BlockTexts) -> None:
    """Raise AssertionError if an invariant is violated."""
    running = engine.scheduler.running
    check_queues(engine)
    check_blocks(engine)
    size, (ids, positions) = block_texts.block_size, entries_of(engine.worker.kv_cache)
    for block, digest in engine.scheduler.pool._hash_of.items():
        assert digest in block_texts.text_of, f"block {block} has an unknown hash"
        text = block_texts.text_of[digest]
        actual = [*zip(ids[block].tolist(), positions[block].tolist())]
        expected = [*zip(text[-size:], range(len(text) - size, len(text)))]
        assert actual == expected, f"the contents of block {block} do not match its hash"
    for request in running:
        check_row(engine, request, ids, positions)


def check_queues(engine: Engine) -> None:
    """Check that a request is in one queue at most, and that only running requests have rows."""
    scheduler, rows = engine.scheduler, engine.config.max_num_seqs
    running, waiting = scheduler.running, list(scheduler.waiting)
    assert len({*running, *waiting}) == len(running) + len(waiting), "a request is queued twice"
    assert all(request.row >= 0 for request in running)
    assert all(request.row < 0 for request in waiting)
    used = [request.row for request in running]
    assert sorted(used + scheduler._free_rows) == list(range(rows)), "rows are leaked or used twice"
    for request in waiting:
        assert (request.row, request.blocks) == (-1, []), "a waiting request holds a row or blocks"
    arrivals = [request.arrival_time for request in waiting if request.num_preemptions]
    assert arrivals == sorted(arrivals), "preempted requests are not in order of arrival"


def check_blocks(engine: Engine) -> None:
    """Check reference counts, the free list, and that hashes and blocks map one to one."""
    pool, scheduler = engine.scheduler.pool, engine.scheduler
    counts = [0] * pool.num_blocks
    for request in scheduler.running:
        assert len(set(request.blocks)) == len(request.blocks), "a request has a block twice"
        for block in request.blocks:
            counts[block] += 1
    assert counts == pool._references, "reference counts do not match the running requests"
    free = sorted(chain(*pool.free))
    assert free == [b for b, n in enumerate(counts) if not n], "the free lists are wrong"
    assert {digest: b for b, digest in pool._hash_of.items()} == pool._block_of, "hashes are inconsistent"


def check_row(engine: Engine, request: Request, ids: Any, positions: Any) -> None:
    """Check that the device has the request's tokens and blocks, and that its KV cache contains the text.
    `ids` and `positions` are the entries of the KV cache."""
    table, size = engine.worker.table, engine.config.block_size
    row, n, blocks = request.row, request.num_tokens, request.blocks
    assert request.num_computed < n <= request.max_len
    assert len(blocks) * size >= request.num_computed, "a request has too few blocks"
    ahead = int(table.num_tokens[row]) - n
    limit = engine.lag * (engine.worker.max_k + 1)
    assert 0 <= ahead <= limit, f"the device is {ahead} tokens ahead of the host"
    assert table.tokens[row, :n].tolist() == request.tokens, "the device has different tokens"
    device = table.block_table[row].tolist()
    assert device == blocks + blocks[-1:] * (len(device) - len(blocks)), "the device has different blocks"
    n = request.num_computed
    text, places = ids[blocks].ravel()[:n].tolist(), positions[blocks].ravel()[:n].tolist()
    assert text == request.tokens[:n], "the KV cache has different tokens"
    assert places == [*range(n)], "the KV cache has different positions"


def check_counters(metrics: Metrics, requests: Sequence[Request], whole: bool) -> None:
    """Check that the engine's metrics match the finished requests. `whole`: no step was interrupted, which
    could leave admitted requests uncounted."""
    spec, stats = metrics.spec, [request.stats for request in requests]
    assert metrics.num_finished + metrics.num_aborted == len(requests), "requests are lost or counted twice"
    for name in ("num_steps", "num_tokens", "num_drafted", "num_accepted", "num_steps_with_drafts"):
        total, expected = getattr(spec, name), sum(getattr(one, name) for one in stats)
        assert total == expected, f"{name} is {total} in the engine and {expected} in its requests"
    assert spec.num_tokens == sum(len(request.output_ids) for request in requests)
    assert all(0 <= one.num_accepted <= one.num_drafted for one in stats)
    assert metrics.num_preemptions == sum(request.num_preemptions for request in requests)
    admitted = [request for request in requests if request.start_time is not None]
    assert all(request.num_cached_tokens < len(request.prompt_ids) for request in requests)
    cached, prompts = metrics.num_cached_tokens, metrics.num_prompt_tokens
    expected = sum(r.num_cached_tokens for r in admitted), sum(len(r.prompt_ids) for r in admitted)
    assert cached <= prompts, f"{cached} of {prompts} prompt tokens were cached"
    is_expected = (cached, prompts) == expected or not whole
    assert is_expected, f"(cached, prompt) tokens are {(cached, prompts)}, expected {expected}"
