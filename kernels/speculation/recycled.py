"""What the target said in earlier steps, kept on the device to guess from: Token Recycling (Luo et al., ACL
2025, arXiv 2408.08696) with two lengths of context.

For every token, and for every pair of tokens, there is an entry: the 8 tokens that the target found likeliest
behind it when it last scored it, whoever asked and whether or not it was accepted (`learn.py` writes,
`grow.py` reads).

    entries  [V + PAIRS, 8] int32    id + 2^18 * code, likeliest first; p = exp(-code / 16). -1: nothing
    tags     [V + PAIRS] int32       whose entry it is, 0: nobody's. That of a token is in its row, that of
                                     a pair in one of PAIRS rows by its hash, whose last writer keeps it

A tag holds the salt of its request, too: an entry is found by requests of equal salts alone, which are those
that may share cached prefixes.

    salts    [S] int32               of each request row
    record   [S, KINDS, 2] float32   of a row's guesses of each kind: how many were right, and how many were
                                     expected to be; earlier steps count less

What is remembered changes how much is guessed right, never what comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.noise import block_mix, mix

WIDTH = 8  # tokens of an entry
PAIRS = 1 << 18
ID_BITS = 18  # of an entry: so many tokens as sampling has at most
CODES = 16  # to a factor of e
MOST_CODE = 4095
NOBODY = -1  # in place of the token before the first

# Who made a guess: the chain that a tree grows on, its first token or a further one; the entry of a token, or
# that of a pair.
KINDS = 4
FIRST, FURTHER, TOKEN, PAIR = range(KINDS)

_PAIRS, _NOBODY = tl.constexpr(PAIRS), tl.constexpr(NOBODY)
OF_TOKEN, OF_PAIR = tl.constexpr(0x68E31DA4), tl.constexpr(0x1B56C4E9)  # arbitrary bits: streams of hashes


class Recycled(NamedTuple):
    """See the module docstring. A tuple, since kernels take it whole."""

    entries: Tensor
    tags: Tensor
    salts: Tensor
    record: Tensor
    vocab_size: int

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Recycled:
        if vocab_size > 1 << ID_BITS:
            raise ValueError(f"A vocabulary of {vocab_size} exceeds the {1 << ID_BITS} that can be recycled.")
        size, i32 = vocab_size + PAIRS, torch.int32
        return cls(
            torch.empty(size, WIDTH, dtype=i32, device=device),  # nobody's are never read
            torch.zeros(size, dtype=i32, device=device),
            torch.zeros(num_rows, dtype=i32, device=device),
            torch.zeros(num_rows, KINDS, 2, device=device),
            vocab_size,
        )


class Place(NamedTuple):
    """A row of the entries, and the tag by which it is known."""

    row: int
    tag: int


def places(before: int, token: int, salt: int, vocab_size: int) -> tuple[Place, Place]:
    """Where the entry of a token is, and that of the pair it makes with the token `before` it."""
    own, pair = mix((salt & 0xFFFFFFFF) ^ OF_TOKEN.value), mix((salt & 0xFFFFFFFF) ^ OF_PAIR.value)
    pair = mix(mix(pair ^ (before & 0xFFFFFFFF)) ^ token)
    row = vocab_size + pair % PAIRS
    return Place(token, _tag(own)), Place(row, _tag(mix(pair ^ OF_PAIR.value)))


def _tag(x: int) -> int:
    """An int32 that is not 0."""
    x |= 1
    return x - (1 << 32) if x >> 31 else x


@triton.jit
def places_of(before, token, salt, vocab_size):
    """`places` of values: (row, tag) of the token, (row, tag) of the pair."""
    salt = salt.to(tl.uint32, bitcast=True)
    own, pair = block_mix(salt ^ OF_TOKEN), block_mix(salt ^ OF_PAIR)
    pair = block_mix(block_mix(pair ^ before.to(tl.uint32, bitcast=True)) ^ token.to(tl.uint32, bitcast=True))
    row = vocab_size + (pair % _PAIRS).to(tl.int32)
    tag = (block_mix(pair ^ OF_PAIR) | 1).to(tl.int32, bitcast=True)
    return token, (own | 1).to(tl.int32, bitcast=True), row, tag
