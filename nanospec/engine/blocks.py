"""KV cache blocks: allocation, sharing and eviction.

Invariants:
* A block is either referenced by at least one request or on the free list, never both.
* A block with a hash holds the K/V of exactly the tokens covered by the hash: its own tokens and, through
  the hash of the previous block, all tokens before them. Drafts are never hashed, only committed tokens.
* A freed block keeps its hash and contents until it is allocated again.

Eviction: blocks without a hash are allocated first. The others are in two lists, each in order of last use:
blocks used by a single request so far, and reused ones. Reused blocks are evicted only while the others are
less than a quarter of the free blocks and were used later: a one-off long prompt does not evict
conversations, and old conversations still make room for new ones.
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
    """Reference-counted blocks and the prefix cache, which finds them by hash."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Free blocks that have been used by one request, and free blocks that have been reused.
        # Each maps a block to the time of its release.
        self.free = OrderedDict.fromkeys(range(num_blocks), 0), OrderedDict[int, int]()
        self._time = 0
        self._reused: set[int] = set()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return sum(map(len, self.free))

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, without adding references."""
        return [self._block_of[digest] for digest in takewhile(self._block_of.__contains__, hashes)]

    def num_available(self, reused: Iterable[int]) -> int:
        """Return the number of blocks that could be allocated after `share(reused)`."""
        return self.num_free - sum(1 for block in set(reused) if not self._references[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, removing it from the free blocks if necessary."""
        for block in blocks:
            if self._references[block] == 0:
                del self.free[block in self._reused][block]
                self._reused.add(block)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None, without changes, if too few are free."""
        if count > self.num_free:
            return None
        blocks = [self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Record the hash of a block in use, unless another block is registered with the same hash."""
        if digest not in self._block_of:
            self.forget([block])
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a request, given in order. The last ones are evicted first,
        since the first ones can be reused without them but not the reverse. If most were reused, the request
        continued a conversation, so that its other blocks count as reused, too."""
        if 2 * len(self._reused.intersection(blocks)) > len(blocks):
            self._reused.update(blocks)
        self._time += 1
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._add_free(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Unregister the hashes of blocks, so that no further request shares them."""
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]

    def _add_free(self, block: int) -> None:
        """Add a block to the end of its list of free blocks, or to the start if it has no hash."""
        if block in self._hash_of:
            self.free[block in self._reused][block] = self._time
        else:
            self._reused.discard(block)
            self.free[0][block] = 0
            self.free[0].move_to_end(block, last=False)

    def _evict(self) -> int:
        """Remove the next block from the free blocks and unregister its hash."""
        once, reused = self.free
        from_once = 3 * len(once) > len(reused)
        if once and not from_once:
            from_once = next(iter(once.values())) < next(iter(reused.values()))
        block, _ = (once if from_once else reused).popitem(last=False)
        self._reused.discard(block)
        self.forget([block])
        return block
