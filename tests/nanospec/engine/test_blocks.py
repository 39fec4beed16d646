"""The block pool: eviction order and hashes. `test_scheduler.py` checks references and the free list."""

from nanospec.engine.blocks import BlockPool, block_hash


def hashes(*tokens: int) -> list[bytes]:
    """Return the hashes of a text in blocks of one token."""
    names: list[bytes] = []
    for token in tokens:
        names.append(block_hash(names[-1] if names else b"", [token]))
    return names


def test_blocks_are_evicted_without_hash_first_then_least_recently_used() -> None:
    pool, names = BlockPool(7), hashes(1, 2, 1)
    assert len({*names, *hashes(2)}) == 4  # a hash covers the text before its block, too
    old, text = pool.allocate(2) or [], pool.allocate(3) or []
    pool.register(old[0], hashes(2)[0])
    for block, name in zip(text, names):
        pool.register(block, name)
    for blocks in (text[2:], text[:2], old):
        pool.release(blocks)
    assert pool.match([*names, *hashes(2)]) == [*text, old[0]]
    assert pool.match([names[0], *hashes(3), names[1]]) == text[:1]
    pool.share(text[2:])  # used again, so that it is evicted last
    assert (pool.num_available([]), pool.num_available([text[0], text[2]])) == (6, 5)
    pool.release(text[2:])
    assert {*(pool.allocate(3) or [])} == {*range(7)} - {old[0], *text}
    assert pool.allocate(5) is None
    assert pool.allocate(1) == text[1:2]  # the end of a text before its start
    assert pool.match(names) == text[:1]
    assert pool.allocate(3) == [text[0], old[0], text[2]]
    assert pool.match(names) == pool.match(hashes(2)) == []


def test_block_and_hash_are_registered_once() -> None:
    pool, (first, second) = BlockPool(2), hashes(1, 2)
    [block, other] = pool.allocate(2) or []
    pool.register(block, first)
    pool.register(other, first)  # the earlier block keeps it
    assert pool.match([first]) == [block]
    pool.register(block, second)
    assert (pool.match([first]), pool.match([second])) == ([], [block])


def test_blocks_used_once_are_evicted_before_reused_ones_down_to_a_quarter() -> None:
    pool = BlockPool(16)

    def used(count: int) -> list[int]:
        blocks = pool.allocate(count) or []
        for block in blocks:
            pool.register(block, block_hash(b"", [block]))
        return blocks

    begun, long = used(5), used(8)
    pool.release(begun)
    pool.share(begun)
    conversation = [*begun, *used(3)]
    pool.release(conversation)  # most were reused, so all count as reused
    pool.release(long)  # later, but only used once
    assert pool.allocate(6) == long[:1:-1]  # 2 of 10 remain, less than a quarter
    assert pool.allocate(2) == conversation[:5:-1]
    assert pool.allocate(9) is None
