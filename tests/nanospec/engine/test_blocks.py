"""The block pool against a reference model of holders, contents and release order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanospec.engine.blocks import BlockPool, block_hash

SIZE = 2  # tokens per block; the pool is independent of it


class PoolMachine(RuleBasedStateMachine):
    """Requests over a vocabulary of two tokens, so that they share many prefixes, take and release blocks."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[list[int]] = []
        self.contents: dict[int, list[int]] = {}  # block -> the text up to its end, if registered
        self.released: dict[int, int] = {}  # block -> when it was released
        self.clock = 0

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def admit(self, text: list[int]) -> None:
        """Share cached blocks, allocate the rest, and register the full blocks."""
        names = hashes(text)
        shared = self.pool.match(names)
        assert shared == self.expected_match(text)
        missing = -(-len(text) // SIZE) - len(shared)
        available = self.pool.num_available(shared)
        free = self.free()
        assert available == len(free - set(shared))
        self.pool.share(shared)
        if missing > available:
            assert self.pool.allocate(missing) is None
            self.release(shared)
            return
        blocks = shared + self.allocate(missing)
        for i in range(len(shared), len(text) // SIZE):
            if text[: (i + 1) * SIZE] not in self.contents.values():
                self.contents[blocks[i]] = text[: (i + 1) * SIZE]
            self.pool.register(blocks[i], names[i])
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.forget(blocks)
        for block in blocks:
            self.contents.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """Allocate, and check that the least recently used blocks were evicted."""
        named = sorted((b for b in self.free() if b in self.contents), key=self.released.__getitem__)
        unnamed = self.free() - set(named)
        blocks = self.pool.allocate(count)
        assert blocks is not None
        assert len(set(blocks)) == count
        plain = min(count, len(unnamed))
        assert set(blocks[:plain]) <= unnamed, "a cached block was evicted before an unnamed one"
        assert blocks[plain:] == named[: count - plain], "not the least recently used ones"
        for block in blocks:
            self.contents.pop(block, None)
        return blocks

    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.clock += 1
            if block in self.free():
                self.released[block] = self.clock

    def free(self) -> set[int]:
        return set(self.pool.free)

    def expected_match(self, text: list[int]) -> list[int]:
        result = []
        for i in range(len(text) // SIZE):
            block = next((b for b, t in self.contents.items() if t == text[: (i + 1) * SIZE]), None)
            if block is None:
                break
            result.append(block)
        return result

    @invariant()
    def references_match_holders(self) -> None:
        if not hasattr(self, "pool"):
            return
        for block in range(self.pool.num_blocks):
            holders = sum(block in blocks for blocks in self.held)
            assert self.pool._references[block] == holders
            assert (block in self.pool.free) == (holders == 0)
        assert len(self.pool.free) == len(self.free())

    @invariant()
    def hashes_match_contents(self) -> None:
        if hasattr(self, "pool"):
            named = {block: hashes(text)[-1] for block, text in self.contents.items()}
            assert self.pool._hash_of == named
            assert self.pool._block_of == {name: block for block, name in named.items()}


def hashes(text: list[int]) -> list[bytes]:
    names: list[bytes] = []
    for i in range(len(text) // SIZE):
        names.append(block_hash(names[-1] if names else b"", text[i * SIZE : (i + 1) * SIZE]))
    return names


def test_block_pool_invariants() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=150, stateful_step_count=40))


def test_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    assert pool.allocate(2) is None
    assert len(pool.free) == 1
    assert held is not None
    pool.release(held)
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]


def test_last_blocks_of_a_request_are_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for block, name in zip(blocks, hashes([1, 2, 3, 4, 5, 6]), strict=True):
        pool.register(block, name)
    pool.release(blocks)
    assert [pool.allocate(1) for _ in range(3)] == [[b] for b in reversed(blocks)]


def test_block_hash_covers_all_preceding_tokens() -> None:
    first, second = block_hash(b"", [1, 2]), block_hash(b"", [2, 1])
    names = {block_hash(parent, [3, 4]) for parent in (b"", b"salt", first, second)}
    assert len(names) == 4
    assert block_hash(b"", [1, 2]) == first
    assert len({block_hash(b"a long salt " * 20 + end, [3, 4]) for end in (b"", b"a", b"b")}) == 3


def test_registering_again_replaces_the_hash() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    first, second = hashes([1, 2]) + hashes([3, 4])
    pool.register(block, first)
    pool.register(block, second)
    assert (pool.match([first]), pool.match([second])) == ([], [block])
