"""What the target said in earlier steps, kept on the device to guess from: Token Recycling (Luo et al., ACL
2025, arXiv 2408.08696) with two lengths of context.

For every token, and for every pair of tokens, there is an entry: the 8 tokens that the target found likeliest
behind it when it last scored it, whoever asked and whether or not it was accepted (`learn.py` writes,
`grow.py` reads).

    entries  [ROWS, 8] int32         id + 2^18 * code, likeliest first; p = exp(-code / 16). -1: nothing
    tags     [ROWS] int32            whose entry it is, 0: nobody's, and the entry is anything. The row is a
                                     hash, and so is the tag; the last writer of a row keeps it

Both are hashes of the salt of the request, too: an entry is found by requests of equal salts alone, which are
those that may share cached prefixes.

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
ROWS = 1 << 19
ID_BITS = 18  # of a token id, and the code has those above it: vocabularies are no larger for sampling either
CODES = 16  # steps of a code to a factor of e
MOST_CODE = 4095
NO_TOKEN, ANY = -1, -2  # in place of the token before: there is none; whatever it is, for entries of tokens

# Who made a guess: the chain that a tree grows on, its first token or a further one; the entry of a token, or
# that of a pair.
KINDS = 4
FIRST, FURTHER, TOKEN, PAIR = range(KINDS)

_ROWS = tl.constexpr(ROWS)
OF_ROW, OF_TAG = tl.constexpr(0x68E31DA4), tl.constexpr(0x1B56C4E9)  # arbitrary bits: streams of hashes


class Recycled(NamedTuple):
    """See the module docstring. A tuple, since kernels take it whole."""

    entries: Tensor
    tags: Tensor
    salts: Tensor
    record: Tensor

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Recycled:
        if vocab_size > 1 << ID_BITS:
            raise ValueError(f"A vocabulary of {vocab_size} exceeds the {1 << ID_BITS} that can be recycled.")
        return cls(
            torch.empty(ROWS, WIDTH, dtype=torch.int32, device=device),
            torch.zeros(ROWS, dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, KINDS, 2, device=device),
        )


class Place(NamedTuple):
    """A row of the entries, and the tag by which it is known."""

    row: int
    tag: int


def place(before: int, token: int, salt: int) -> Place:
    """Where the entry of the pair of a token and the one `before` it is, or with ANY that of the token."""
    x = OF_ROW.value
    for part in (salt, before, token):
        x = mix(x ^ (part & 0xFFFFFFFF))
    tag = mix(x ^ OF_TAG.value) | 1
    return Place(x % ROWS, tag - (1 << 32) if tag >> 31 else tag)


@triton.jit
def place_of(before, token, salt):
    """`place` of values: (row, tag)."""
    x = block_mix(salt.to(tl.uint32, bitcast=True) ^ OF_ROW)
    x = block_mix(block_mix(x ^ before.to(tl.uint32, bitcast=True)) ^ token.to(tl.uint32, bitcast=True))
    return (x % _ROWS).to(tl.int32), (block_mix(x ^ OF_TAG) | 1).to(tl.int32, bitcast=True)
