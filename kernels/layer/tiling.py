"""How a product is cut into programs: the one decision behind `product.py`, from an estimate of its time.

    choose_tiling(T, N, K, arch) -> Tiling            x [T, K] with weight [N, K]

Two things are decided. The parts of K fix the order of a sum, so they depend on the weight's shape and
the architecture alone: what a small step needs, since that is where a weight has too few blocks to
fill the machine. All else may depend on the number of tokens T, because it changes no bit.

Worked example, an H200 with 132 processors. 0.6B o [1024, 2048] and down [1024, 3072] have 16 blocks of 64
rows: 8 parts make 128 programs, 97 % of the machine. gate_up [6144, 1024] has 96 blocks, of which
each can draw as much as memory has for it: no parts, since a second one would cost a ticket. qkv [4096, 1024]
has 32 blocks of one head: 4 parts, 128 programs. 8B gate_up [24576, 4096] has 384 blocks, three for each
processor, 97 %; o and down have 64: 2 parts, 128 programs; qkv [6144, 4096] has 48 blocks of one head: 5
parts, 240 programs, 91 %. None of our own figures has been measured; what a processor takes from the L2 cache
is an H100's, 5.5 to 5.7e12 bytes per second for 114 of them at 1.755 GHz (microbenchmarks).
"""

from functools import cache
from typing import NamedTuple

CHOSEN_AT = 16  # tokens for which the parts of K are chosen
INSTRUCTION = 16  # columns of K that one matrix instruction takes
START = 1500  # clocks until the first tile of a program has arrived
TICKET = 2500  # clocks from the end of the last part's product until the parts are added


class Machine(NamedTuple):
    processors: int
    shared: int  # bytes of shared memory of a processor
    memory: float  # bytes per clock that memory gives to all processors
    cache: float  # bytes per clock that a processor takes from the L2 cache
    macs: int  # products of bf16 per clock and processor


MACHINES = {
    "sm_80": Machine(108, 163 << 10, 1440, 32, 1024),
    "sm_90": Machine(132, 227 << 10, 2740, 28, 2048),
    "sm_100": Machine(148, 227 << 10, 4300, 32, 4096),
    "gfx942": Machine(304, 64 << 10, 2520, 32, 1024),
}


class Tiling(NamedTuple):
    """How one product runs.

    Attributes:
        rows, width: of the weight and tokens in a program's tile.
        block_k, warps, stages: columns per step, and what the compiler is told.
        splits, part: K is summed in `splits` parts of `part` columns, the last may be shorter.
        apart: each part is a program of its own; otherwise one program does all parts in turn.
        clocks: what this is estimated to take.
    """

    rows: int
    width: int
    block_k: int
    warps: int
    stages: int
    splits: int
    part: int
    apart: bool
    clocks: float


@cache
def choose_tiling(T: int, N: int, K: int, arch: str, itemsize: int = 2, unit: int = 1) -> Tiling:
    """The tiling with the least estimated time.

    Args:
        unit: rows of the weight that must be in one program: a head's, for what needs whole heads.
    """
    splits, part = parts(N, K, arch, unit)
    tilings = [
        _tiling(T, N, K, arch, itemsize, (rows, width), splits, part, apart)
        for rows, width in _tiles(T, arch, max(unit, 64))
        for apart in ((True, False) if splits > 1 else (False,))
        if _fits(rows, width, 2 if splits > 1 else 1)
    ]
    return min(tilings, key=lambda tiling: tiling.clocks)


@cache
def parts(N: int, K: int, arch: str, unit: int = 1) -> tuple[int, int]:
    """(number of parts of K, columns of each but the last): what is fastest for few tokens."""
    step = 128 if K % 128 == 0 else 64  # whole steps of the kernel's loop
    sizes = [step * -(-K // (step * count)) for count in range(1, 17)]
    found = [
        _tiling(CHOSEN_AT, N, K, arch, 2, (max(unit, 64), 16), -(-K // part), part, -(-K // part) > 1)
        for part in sizes
        if part == sizes[0] or part >= 128
    ]
    best = min(found, key=lambda tiling: tiling.clocks)  # the first, with the fewest parts, of equals
    return best.splits, best.part


def _tiles(T: int, arch: str, least: int) -> list[tuple[int, int]]:
    """(rows of the weight, tokens) of the tiles worth a try. Few rows make many programs, which is what
    reading the weight needs; larger tiles read both operands less often."""
    if T <= 32:
        return [(least, 16 if T <= 16 else 32)]
    widths = (64,) if T <= 64 else (64, 128)
    most = 256 if arch == "sm_90" and T > 64 else 128
    if least > 64:  # several wide heads would spill
        most = least
    return [(rows, width) for width in widths for rows in (64, 128, 256) if least <= rows <= most]


def _fits(rows: int, width: int, sums: int) -> bool:
    """Whether the sums of a tile (of a part, and of all) fit the registers beside all else."""
    return rows * width * sums <= 128 * 32 * _warps(rows, width)


def _warps(rows: int, width: int) -> int:
    return 8 if rows * width >= 128 * 64 else 4


def _tiling(
    T: int, N: int, K: int, arch: str, itemsize: int,
    tile: tuple[int, int], splits: int, part: int, apart: bool,
) -> Tiling:  # fmt: skip
    machine, (rows, width) = MACHINES[arch], tile
    warps = _warps(rows, width)
    tiles = -(-N // rows) * -(-T // width)
    programs = tiles * (splits if apart else 1)
    columns = part if apart else K
    share = -(-programs // machine.processors)  # programs of the busiest processor

    per_instruction = max(
        rows * width * INSTRUCTION / machine.macs, (rows + width) * 2 * INSTRUCTION / machine.cache
    )
    traffic = itemsize * (N * K + T * (N + K))
    times = share * columns / INSTRUCTION * per_instruction, traffic / machine.memory
    clocks = max(times) + min(times) / 8  # they overlap, but not wholly

    block_k = 128 if rows == 64 and width <= 32 and K % 128 == 0 else 64
    together = min(
        share, 1 if rows * width > 128 * 64 else 2 if width == 64 else 3
    )  # on one processor at a time
    stage = (rows + width) * block_k * itemsize
    stages = min(machine.shared // together // stage, columns // block_k + 1, 6)
    clocks += START * -(-share // together)
    if apart and splits > 1:
        clocks += TICKET + 8 * splits * T * N / machine.memory
    return Tiling(rows, width, block_k, warps, max(stages, 1), splits, part, apart and splits > 1, clocks)
