"""KV cache blocks: allocation, sharing and eviction.

Invariants:
* A block is either referenced by at least one request or on the free list, never both.
* A block with a hash holds the K/V of exactly the tokens covered by the hash: its own tokens and, through
  the hash of the previous block, all tokens before them. Drafts are never hashed, only committed tokens.
* A freed block keeps its hash and contents until it is allocated again. Blocks without a hash are allocated
  first, then the least recently used.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the 16-byte hash of a full block from its tokens and its parent, the hash of the previous block
    (b"" or a salt for the first). The number of tokens is fixed, so the concatenation is unambiguous."""
    return hashlib.blake2b(array("q", tokens).tobytes() + parent, digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks and the prefix cache, which finds them by hash. `free` is the free list."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, without adding references."""
        return [self._block_of[digest] for digest in takewhile(self._block_of.__contains__, hashes)]

    def num_available(self, reused: Iterable[int]) -> int:
        """Return the number of blocks that could be allocated after `share(reused)`."""
        return len(self.free) - sum(1 for block in set(reused) if not self._references[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, removing it from the free list if necessary."""
        for block in blocks:
            if self._references[block] == 0:
                del self.free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None, without changes, if too few are free."""
        if count > len(self.free):
            return None
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        self.forget(blocks)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Record the hash of a block in use, unless another block is registered with the same hash."""
        if digest in self._block_of:
            return
        self.forget([block])
        self._hash_of[block] = digest
        self._block_of[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a request, given in order. The last ones are evicted first,
        since the first ones can be reused without them but not the reverse."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self.free[block] = None
                if block not in self._hash_of:
                    self.free.move_to_end(block, last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Unregister the hashes of blocks, so that no further request shares them."""
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
