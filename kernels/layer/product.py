"""The matrix product of a layer, for any number of rows, with what surrounds it; `linear.py` chooses it.

    out [T, N] = epilogue(x [T, K] @ weight [N, K].T)         epilogue: bias, gate, residual stream

The bits of a token do not depend on the number of tokens beside it: everything that fixes a sum's order
depends on the weight's shape only. "Rows" here are those of the weight:

* K is cut into parts (`parts_of`). Each is summed in one accumulator in ascending order, and the parts are
  added in ascending order. For few tokens the parts run *apart*: each is a program, and the one that happens
  to finish last adds them; no floating-point atomics, no second launch. For many tokens *one* program runs
  them all, adds a part to the total when it is done, and keeps nothing in memory.
* The weight is the left operand: its rows are the rows of the matrix instruction, tokens the columns.
  So the instruction is the same family for 1 token and for 2,000 (only its width differs), and few
  tokens waste little of it.

RMSNorm costs no launch and nothing in the loop: norm(x) @ W.T = (x * norm_weight) @ W.T / rms(x). The kernel
that writes x also writes x * norm_weight and sums of its squares (`stream.py`); the product of the first is
divided by the root of the second at its end.

Calls on one device must not overlap on several streams: they share the tickets by which the last program
knows itself.
"""

from collections import namedtuple
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ONE_SHAPE, arch, options, prefetch, release_next, tickets, wait_for_previous, wrapped
from .stream import Stream, Written, load_squares, store_squares, sum_squares, tree_sum

PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes of each
VALUES = 4096  # of a tile that a program finishes at a time
SHORT = 1024  # columns of K that one program reads as fast as several, which wait for each other
SHORTEST = 256  # columns of a part
FEW = 256  # tokens up to which parts run apart; beyond, their sums are too much to write and read


class Tiling(NamedTuple):
    """How one product runs."""

    rows: int  # of the weight in a program's tile
    width: int  # tokens in it
    block_k: int  # columns of K to a step
    warps: int
    stages: int
    parts: int  # of K
    part: int  # columns of each, but that the last may be shorter
    apart: bool  # whether each part is a program of its own; otherwise one program does all in turn


def parts_of(N: int, K: int, target: str) -> tuple[int, int]:
    """Return the number of parts of K and the columns of each but the last: as many as fill the machine with
    programs of 64 rows, since a small step has no others. 0.6B down [1024, 3072] on 132 processors: 8."""
    step = 128 if K % 128 == 0 else 64  # whole steps of the kernel's loop
    most = K // SHORTEST if K > SHORT else 1
    count = max(min(PROCESSORS[target] // triton.cdiv(N, 64), most), 1)
    part = step * triton.cdiv(K, step * count)
    return triton.cdiv(K, part), part


@cache
def choose_tiling(T: int, N: int, K: int, target: str, itemsize: int) -> Tiling:
    """Return the tiling of x [T, K] and weight [N, K]: the largest tile that occupies most of the machine."""
    parts, part = parts_of(N, K, target)
    apart = parts > 1 and T <= FEW
    tiles = [(64, 16 if T <= 16 else 32)] if T <= 32 else [(128, 64), (64, 64)]
    if T > 64:  # the first needs the registers of sm_90, and one sum alone (of a part, or of all)
        tiles = [*([(256, 128)] if target == "sm_90" and parts == 1 else []), (128, 128), *tiles]
    for rows, width in tiles:
        programs = triton.cdiv(N, rows) * triton.cdiv(T, width) * (parts if apart else 1)
        if programs >= 0.75 * PROCESSORS[target]:
            break
    block_k = 128 if rows == 64 and width <= 32 and K % 128 == 0 else 64
    share = triton.cdiv(programs, PROCESSORS[target])
    together = min(share, max(128 * 128 // (rows * width), 1), 3)  # on one processor, whose memory they share
    stages = SHARED[target] // together // ((rows + width) * block_k * itemsize)
    warps = 8 if rows * width >= 128 * 64 else 4
    return Tiling(rows, width, block_k, warps, max(min(stages, 6), 1), parts, part, apart)


# x [T, K], weight [N, K], bias [N]; the sums of squares of `Stream` for the norm of x; for parts that run
# apart, `partial` [tiles, parts, BLOCK_T, BLOCK_N] float32 and `tickets`, see `launch.py`.
Operands = namedtuple("Operands", "x weight bias squares partial tickets")

# N: rows of the weight, or of its gate. eps: of the norm of x.
Sizes = namedtuple("Sizes", "N K x_stride eps")

# A program's tile of tokens, block of weight rows and part of K; these tokens t [BLOCK_T] and rows [BLOCK_N],
# and which of them exist.
Tile = namedtuple("Tile", "index block part t t_in rows rows_in")

# What the kernel is compiled for: how the product is cut, see `Tiling`; SLICE tokens that it finishes at a
# time; GROUPS of sums of squares; what surrounds the product, where GATE is "silu", "gelu" or "".
Constants = namedtuple(
    "Constants", "PARTS APART BLOCK_T BLOCK_N BLOCK_K SLICE EVEN PRECISION PDL GROUPS BIAS GATE ADD"
)


@triton.jit(do_not_specialize=["T", "steps"])
def _gemm(operands, new, T, steps, sizes, C: tl.constexpr):
    """Grid: tiles of tokens, blocks of weight rows, parts of K that run apart. A part has `steps` steps of
    BLOCK_K columns."""
    release_next(C.PDL)
    index, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = index * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    t_in = t < T
    i = tl.arange(0, C.BLOCK_N)
    rows = block * C.BLOCK_N + i
    column = rows
    if C.GATE != "":  # rows `column` and N + column, 8 apart: a matrix instruction leaves both to one thread
        column = block * (C.BLOCK_N // 2) + i // 16 * 8 + i % 8
        rows = column + i // 8 % 2 * sizes.N
    rows_in = column < sizes.N
    tile = Tile(index, block, part, t, t_in, rows, rows_in)
    prefetch_weight(operands.weight, tile, part * steps * C.BLOCK_K, sizes.K, C)
    wait_for_previous(C.PDL)
    # Few sums of squares are loaded before the product and added behind it; many would take its registers.
    scale = tl.full([1, C.BLOCK_T], 1.0, tl.float32)
    COUNT: tl.constexpr = triton.next_power_of_2(C.GROUPS)
    if C.GROUPS > 0 and C.BLOCK_T <= 32:
        squares = load_squares(operands.squares, 0, t, t_in, T, C.GROUPS, COUNT)
    acc = sum_of_products(operands, tile, steps, sizes, C)
    if C.APART:
        acc, last = add_parts(acc, operands, tile, C)
        if not last:
            return
    if C.GROUPS > 0:
        if C.BLOCK_T <= 32:
            total = tree_sum(squares)
        else:
            total = sum_squares(operands.squares, 0, t, t_in, T, C.GROUPS, COUNT)
        scale = tl.rsqrt(total / sizes.K + sizes.eps)[None, :]
    for s in tl.static_range(C.BLOCK_T // C.SLICE):  # one after the other, because registers are dear here
        value = token_slice(acc, s, C.SLICE) * token_slice(scale, s, C.SLICE)
        if C.BIAS:
            value += tl.load(operands.bias + rows, rows_in, other=0.0).to(tl.float32)[:, None]
        finish(value, new, tile, s, T, sizes.N, C)


@triton.jit
def prefetch_weight(weight, tile, first, K, C: tl.constexpr):
    """Ask for the first cache lines of each of the tile's rows, from column `first` on."""
    if C.PDL:
        LINES: tl.constexpr = 512 // C.BLOCK_N
        WIDTH: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
        column = tl.minimum(first + tl.arange(0, LINES) * WIDTH, K - 1)
        row = tl.where(tile.rows_in, tile.rows, 0).to(tl.int64)
        prefetch(weight + row[:, None] * K + column[None, :], C.PDL)


@triton.jit
def sum_of_products(operands, tile, steps, sizes, C: tl.constexpr):
    """Return the sums [BLOCK_N, BLOCK_T] of a tile over K, or a part of K where parts run apart."""
    k = tl.arange(0, C.BLOCK_K)
    x_row = operands.x + tile.t.to(tl.int64)[:, None] * sizes.x_stride
    w_row = operands.weight + tile.rows.to(tl.int64)[:, None] * sizes.K
    count = tl.cdiv(sizes.K, C.BLOCK_K)
    first = 0
    if C.APART:
        first = tile.part * steps
        count = tl.minimum(count - first, steps)
    total = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
    acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
    left = steps
    for step in range(tl.maximum(count, 1)):  # known to run, or ptxas lets no two wgmma overlap
        column = (first + step) * C.BLOCK_K + k  # known to be aligned, unlike a running sum
        k_in = tl.full([C.BLOCK_K], True, tl.int1) if C.EVEN else column < sizes.K
        value = tl.load(x_row + column[None, :], tile.t_in[:, None] & k_in[None, :], other=0.0)
        w = tl.load(w_row + column[None, :], tile.rows_in[:, None] & k_in[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(value), acc, input_precision=C.PRECISION)
        if C.PARTS > 1 and not C.APART:
            left -= 1
            if left == 0:
                total += acc
                acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
                left = steps
    if C.PARTS > 1 and not C.APART:
        acc = total + acc  # zero, or the last part, which is shorter
    return acc


@triton.jit
def add_parts(acc, operands, tile, C: tl.constexpr):
    """Store the sums of this part. Return (all parts added in ascending order, True) in the program that is
    the last of a tile to get here, (acc, False) in the others."""
    number = tile.block * tl.num_programs(0) + tile.index
    i, t = tl.arange(0, C.BLOCK_N)[:, None], tl.arange(0, C.BLOCK_T)[None, :]
    place = operands.partial + number * C.PARTS * C.BLOCK_N * C.BLOCK_T + t * C.BLOCK_N + i
    tl.store(place + tile.part * C.BLOCK_N * C.BLOCK_T, acc, tile.t_in[None, :])
    tl.debug_barrier()  # all threads have stored before one of them says so
    last = tl.atomic_add(operands.tickets + number, 1, sem="acq_rel") == C.PARTS - 1
    if last:
        tl.store(operands.tickets + number, 0)  # ready for the next launch
        acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
        for part in tl.static_range(C.PARTS):  # unrolled, so that their loads are under way together
            at = place + part * C.BLOCK_N * C.BLOCK_T
            acc += tl.load(at, tile.t_in[None, :], other=0.0, cache_modifier=".cg")
    return acc, last


@triton.jit
def token_slice(tile, INDEX: tl.constexpr, SLICE: tl.constexpr):
    """Return the tokens INDEX * SLICE and on of a tile [rows, tokens]. Registers cannot be indexed, so it is
    halved along its tokens until SLICE are left; both halves of a value's pair lie in the same thread."""
    WIDTH: tl.constexpr = tile.shape[1]
    if WIDTH > SLICE:
        left, right = tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, WIDTH // 2]), [0, 2, 1]))
        HALF: tl.constexpr = WIDTH // 2 // SLICE
        if INDEX < HALF:
            tile = token_slice(left, INDEX, SLICE)
        else:
            tile = token_slice(right, INDEX - HALF, SLICE)
    return tile


@triton.jit
def finish(value, new, tile, s, T, N, C: tl.constexpr):
    """Write the outputs of slice `s` of a tile, whose sums are `value` [BLOCK_N, SLICE]."""
    if C.GATE != "":
        halves = tl.reshape(value, [C.BLOCK_N // 16, 2, 8, C.SLICE])
        gate, up = tl.split(tl.permute(halves, [0, 2, 3, 1]))
        turn = gate  # silu(x) = x / (1 + e^-x)
        if C.GATE == "gelu":  # and gelu, by tanh: x / (1 + e^-y) with this y
            turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = tl.reshape(gate / (1.0 + tl.exp(-turn)) * up, [C.BLOCK_N // 2, C.SLICE])
    COLUMNS: tl.constexpr = value.shape[0]
    first = tile.index * C.BLOCK_T + s * C.SLICE
    n, t = tile.block * COLUMNS + tl.arange(0, COLUMNS), first + tl.arange(0, C.SLICE)
    inside = (n < N)[:, None] & (t < T)[None, :]
    corner = first.to(tl.int64) * N + tile.block * COLUMNS
    at = tl.arange(0, C.SLICE)[None, :] * N + tl.arange(0, COLUMNS)[:, None]  # fits 32 bits
    if C.ADD:
        value += tl.load(new.residual + corner + at, inside, other=0.0).to(tl.float32)
    value = value.to(new.x.dtype.element_ty)
    tl.store(new.x + corner + at, value, inside)
    if C.ADD:
        wide = value.to(tl.float32)
        by = tl.load(new.weight + n, n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(new.scaled + corner + at, (wide * by).to(new.scaled.dtype.element_ty), inside)
        store_squares(wide, new.squares, tile.block * COLUMNS, t, T, N)


def product(
    source: Tensor | Stream, weight: Tensor, bias: Tensor | None, gate: str = "", new: Written | None = None
) -> Tensor:
    """Return `source`, a tensor or a stream's norm, @ weight.T + bias; or act(g) * u of its halves [g; u].
    It goes to `new` if that is given, plus its residual."""
    if isinstance(source, Tensor):
        x, squares, eps = source, None, 0.0
    else:
        x, squares, eps = source.scaled, source.squares, source.norm.eps
        assert x is not None  # as it is where `embed` took its kernel
    (T, K), N, target = x.shape, len(weight), arch(x)
    if new is None:
        new = Written(x.new_empty(T, N // 2 if gate else N))
    if T == 0:
        return new.x
    cut, given = choose_tiling(T, N, K, target, x.itemsize), options(x)
    tiles, blocks, apart = triton.cdiv(T, cut.width), triton.cdiv(N, cut.rows), cut.parts if cut.apart else 1
    partial = x.new_empty(tiles * blocks * apart * cut.apart, cut.rows * cut.width, dtype=torch.float32)
    constants = Constants(
        cut.parts, cut.apart, cut.width, cut.rows, cut.block_k, min(cut.width, 32, VALUES // cut.rows),
        EVEN=K % cut.block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=given.pop("PDL"), GROUPS=0 if squares is None else len(squares), BIAS=bias is not None,
        GATE=gate, ADD=new.residual is not None,
    )  # fmt: skip
    _gemm[tiles, blocks, apart](
        Operands(x, weight, bias, squares, partial, tickets(x.device, "product")), new, T,
        cut.part // cut.block_k, Sizes(N // 2 if gate else N, K, x.stride(0), eps), wrapped(constants),
        num_warps=cut.warps, num_stages=cut.stages, **given, **ONE_SHAPE.get(target, {}),
    )  # fmt: skip
    return new.x
