"""The pages of the KV cache: allocate, share, free.

Invariants:
* A block is either referenced by at least one request or on the free list, never both.
* A block with a hash holds the K/V of exactly the tokens the hash names (a chain: the hash of a block
  covers everything before it). Only committed tokens are hashed, never drafts.
* A freed block keeps its hash and contents until it is allocated again; the least recently used one
  goes first, and blocks without a hash before all others.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a full block, of its tokens and the previous block's hash (b"" or a salt at first).
    The tokens have a fixed length, so hashing them before the parent is unambiguous."""
    return hashlib.blake2b(array("q", tokens).tobytes() + parent, digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks and a cache of what they hold; those without a reference are `free`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of `hashes`. Takes no reference."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_available(self, reused: Iterable[int]) -> int:
        """Return the number of blocks that `allocate` could give after `share(reused)`."""
        return len(self.free) - sum(1 for block in set(reused) if not self._references[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free one leaves the free list."""
        for block in blocks:
            if self._references[block] == 0:
                del self.free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None (and no change) if too few are free."""
        if count > len(self.free):
            return None
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        self.forget(blocks)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, name: bytes) -> None:
        """Record the hash of a block in use. A second block with the same contents gets none."""
        if name in self._block_of:
            return
        self.forget([block])
        self._hash_of[block] = name
        self._block_of[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block. Pass a request's blocks in order: later ones are evicted
        first, since a prefix is of more use than what follows it."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self.free[block] = None
                if block not in self._hash_of:
                    self.free.move_to_end(block, last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the hashes of blocks, so that no other request shares them."""
        for block in blocks:
            name = self._hash_of.pop(block, None)
            if name is not None:
                del self._block_of[name]
