"""The block pool against a reference model of holders, contents and release order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.engine.blocks import BlockPool, block_hash

SIZE = 2  # tokens per block; the pool is independent of it


def hashes(text: list[int]) -> list[bytes]:
    names: list[bytes] = []
    for i in range(0, len(text) - SIZE + 1, SIZE):
        names.append(block_hash(names[-1] if names else b"", text[i : i + SIZE]))
    return names


class Reference:
    """Requests over a vocabulary of two tokens, so that they share many prefixes, take and release blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[list[int]] = []
        self.contents: dict[int, list[int]] = {}  # block -> the text up to its end, if registered
        self.unused = list(range(num_blocks))  # in order of release

    def admit(self, text: list[int]) -> None:
        """Share cached blocks, allocate the rest, and register the full blocks."""
        names, shared = hashes(text), list[int]()
        block_of = {tuple(known): block for block, known in self.contents.items()}
        for end in range(SIZE, len(text) + 1, SIZE):
            if tuple(text[:end]) not in block_of:
                break
            shared.append(block_of[tuple(text[:end])])
        assert self.pool.match(names) == shared
        missing = -(-len(text) // SIZE) - len(shared)
        assert self.pool.num_available(shared) == len(set(self.unused) - set(shared))
        self.pool.share(shared)
        self.unused = [block for block in self.unused if block not in shared]
        if missing > len(self.unused):
            assert self.pool.allocate(missing) is None
            self.release(shared)
            return
        blocks = shared + self.allocate(missing)
        for i in range(len(shared), len(names)):
            if text[: (i + 1) * SIZE] not in self.contents.values():
                self.contents[blocks[i]] = text[: (i + 1) * SIZE]
            self.pool.register(blocks[i], names[i])
        self.held.append(blocks)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks: first those without a hash, then the least recently used."""
        unnamed = [block for block in self.unused if block not in self.contents]
        named = [block for block in self.unused if block in self.contents]
        blocks = self.pool.allocate(count)
        assert blocks is not None
        assert len(set(blocks)) == count
        assert set(blocks[: len(unnamed)]) <= set(unnamed), "a cached block was evicted too early"
        assert blocks[len(unnamed) :] == named[: max(count - len(unnamed), 0)], "eviction is not LRU"
        for block in blocks:
            self.unused.remove(block)
            self.contents.pop(block, None)
        return blocks

    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        still = {block for others in self.held for block in others}
        self.unused += [block for block in reversed(blocks) if block not in still]

    def forget(self, blocks: list[int]) -> None:
        self.pool.forget(blocks)
        for block in blocks:
            self.contents.pop(block, None)

    def check(self) -> None:
        counts = [sum(block in blocks for blocks in self.held) for block in range(self.pool.num_blocks)]
        assert self.pool._references == counts
        assert sorted(self.pool.free) == sorted(self.unused)
        names = {block: hashes(text)[-1] for block, text in self.contents.items()}
        assert self.pool._hash_of == names
        assert self.pool._block_of == {name: block for block, name in names.items()}


@settings(max_examples=200)
@given(rng=st.randoms(use_true_random=True), num_blocks=st.integers(1, 8))
def test_block_pool_matches_reference(rng: random.Random, num_blocks: int) -> None:
    reference = Reference(num_blocks)
    for _ in range(40):
        event = rng.random() if reference.held else 0.0
        if event < 0.6:
            reference.admit(rng.choices((0, 1), k=rng.randint(1, 10)))
        elif event < 0.9:
            reference.release(reference.held.pop(rng.randrange(len(reference.held))))
        else:
            reference.forget(rng.choice(reference.held))
        reference.check()


def test_registering_again_replaces_the_hash() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1) or []
    first, second = hashes([1, 2]) + hashes([3, 4])
    pool.register(block, first)
    pool.register(block, second)
    assert (pool.match([first]), pool.match([second])) == ([], [block])
