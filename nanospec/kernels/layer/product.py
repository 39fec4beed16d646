"""The matrix product of a linear layer for any number of tokens, with fused prologue and epilogue.

    out [T, N] = epilogue(x [T, K] @ weight [N, K].T)         epilogue: bias, gate, residual stream

The result of a token is bitwise independent of the number of tokens, because the order of its sum depends
only on the shape of the weight and on the GPU. "Rows" here are rows of the weight:

* K is divided into parts (`tiling.py`). Each part is summed in ascending order in one accumulator, and
  the parts are added in ascending order. For few tokens (`split_k`), each part is a program, and the last
  one to finish adds them, without floating-point atomics or a second launch. For many tokens, one program
  processes all parts and adds each to the total, without storing partial sums.
* The weight is the left operand: its rows are M of the MMA instruction, tokens are N. So 1 token and 2,000
  tokens use the same instruction except for N, and small batches waste little of it.

RMSNorm of x needs no launch and no work in the loop, see `residual.py`.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import gpu_of, options, prefetch, release_next, wait_for_previous, wrapped
from .dequantize import PackedCodes, load_dequantized, row_words
from .residual import Outputs, Residual, load_squares, pairwise_sum, store_squares, sum_squares
from .tiling import MAX_SPLIT_TOKENS, choose_tiling

Weight = Tensor | PackedCodes
VALUES = 4096  # elements of a tile per slice of the epilogue


# x [T, K], weight [N, K], bias [N]; `squares` of `Residual` for the norm of x; with split K, `partial` [tiles
# of tokens * blocks of rows, parts, BLOCK_T, BLOCK_N] float32 and `counters` (see `new_counters`); for
# `PackedCodes`, the codes as `weight`, and `words`.
Operands = namedtuple("Operands", "x weight bias squares partial counters words", defaults=[None])

# N: rows of the weight, or of its gate half. eps: of the norm of x. shift, factor: see `PackedCodes`.
Sizes = namedtuple("Sizes", "N K x_stride eps shift factor", defaults=[None, None])

# The tile of tokens, block of weight rows and part of K of a program; its tokens t [BLOCK_T], rows [BLOCK_N],
# and masks of those in range.
Tile = namedtuple("Tile", "index block part t t_in rows rows_in")

# Compile-time constants: the tiling (see `tiling.py`); SLICE: tokens per slice of the epilogue; GROUPS: sums
# of squares per token; the fused operations, where GATE is "silu", "gelu" or ""; SKIP: if `num_used` is set.
Constants = namedtuple(
    "Constants", "PARTS SPLIT_K BLOCK_T BLOCK_N BLOCK_K SLICE EVEN PRECISION PDL GROUPS BIAS GATE ADD SKIP"
)


@triton.jit(do_not_specialize=["T", "steps"])
def _gemm(operands, new, T, steps, sizes, C: tl.constexpr, CODES: tl.constexpr = None):
    """Grid: (tiles of tokens, blocks of weight rows, parts of K if split_k). A part has `steps` steps of
    BLOCK_K columns. `new`: see `Outputs`. CODES: if the weight is quantized."""
    release_next(C.PDL)
    tile = this_tile(T, sizes, C)
    prefetch_weight(operands.weight, tile, tile.part * steps * C.BLOCK_K, sizes.K, C, CODES)
    by = 0.0
    if C.ADD:  # the weight of the next norm
        by = tl.load(new.weight + tile.rows, tile.rows_in, other=0.0).to(tl.float32)[:, None]
    wait_for_previous(C.PDL)
    if C.SKIP:
        used = tl.load(new.num_used, tile.index > 0, other=1)  # few tokens are one tile, which does not wait
        if tile.index * C.BLOCK_T >= used:
            return
    FEW: tl.constexpr = C.BLOCK_T <= 32  # registers hold the squares, to be added up after the product
    if C.GROUPS > 0:
        if FEW:
            squares = load_squares(operands.squares, tile.t, tile.t_in, T, C.GROUPS)
        else:
            total = sum_squares(operands.squares, tile.t, tile.t_in, T, C.GROUPS)
    EARLY: tl.constexpr = FEW or not C.SPLIT_K  # else 8 bytes spill in `add_parts` (triton 3.9)
    if C.ADD and EARLY:
        residual = load_residual(new, tile, 0, T, sizes.N, C)
    acc = sum_of_products(operands, tile, steps, sizes, C, CODES)
    if C.SPLIT_K:
        acc, last = add_parts(acc, operands, tile, C)
        if not last:
            return
    if C.ADD and not EARLY:
        residual = load_residual(new, tile, 0, T, sizes.N, C)
    if C.GROUPS > 0:
        total = pairwise_sum(squares) if FEW else total
        scale = tl.rsqrt(total / sizes.K + sizes.eps)[None, :]
    for s in tl.static_range(C.BLOCK_T // C.SLICE):  # by slices, to save registers
        value = token_slice(acc, s, C.SLICE) * (token_slice(scale, s, C.SLICE) if C.GROUPS > 0 else 1.0)
        if C.BIAS:
            value += tl.load(operands.bias + tile.rows, tile.rows_in, other=0.0).to(tl.float32)[:, None]
        if C.ADD:
            value += residual.to(tl.float32)
            if s + 1 < C.BLOCK_T // C.SLICE:  # a slice ahead
                residual = load_residual(new, tile, s + 1, T, sizes.N, C)
        epilogue(value, by, new, tile, s, T, sizes.N, C)


@triton.jit
def this_tile(T, sizes, C: tl.constexpr):
    """Return the tile of this program."""
    index, block = tl.program_id(0), tl.program_id(1)
    t, i = index * C.BLOCK_T + tl.arange(0, C.BLOCK_T), tl.arange(0, C.BLOCK_N)
    rows = block * C.BLOCK_N + i
    column = rows
    if C.GATE != "":  # put rows `column` and N + column 8 apart: one thread gets both results
        column = block * (C.BLOCK_N // 2) + i // 16 * 8 + i % 8
        rows = column + i // 8 % 2 * sizes.N
    return Tile(index, block, tl.program_id(2), t, t < T, rows, column < sizes.N)


@triton.jit
def prefetch_weight(weight, tile, first, K, C: tl.constexpr, CODES: tl.constexpr):
    """Prefetch the first cache lines of each weight row of the tile, from column `first` on."""
    if CODES is not None:
        first, K = first * CODES.BITS // 32, row_words(K, CODES)
    LINES: tl.constexpr = 512 // C.BLOCK_N
    WIDTH: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    column = tl.minimum(first + tl.arange(0, LINES) * WIDTH, K - 1)
    row = tl.where(tile.rows_in, tile.rows, 0).to(tl.int64)
    prefetch(weight + row[:, None] * K + column[None, :], C.PDL)


@triton.jit
def sum_of_products(operands, tile, steps, sizes, C: tl.constexpr, CODES: tl.constexpr):
    """Return the sums [BLOCK_N, BLOCK_T] of a tile over K, or over its part of K if split_k."""
    k = tl.arange(0, C.BLOCK_K)
    x_row = operands.x + tile.t.to(tl.int64)[:, None] * sizes.x_stride
    w_row = operands.weight + tile.rows.to(tl.int64)[:, None] * sizes.K
    count = tl.cdiv(sizes.K, C.BLOCK_K)
    first = 0
    if C.SPLIT_K:
        first = tile.part * steps
        count = tl.minimum(count - first, steps)
    total = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
    acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
    left = steps
    for step in range(tl.maximum(count, 1)):  # at least one, so that ptxas lets wgmmas overlap
        column = (first + step) * C.BLOCK_K + k  # provably aligned, unlike a running sum
        k_in = tl.full([C.BLOCK_K], True, tl.int1) if C.EVEN else column < sizes.K
        value = tl.load(x_row + column[None, :], tile.t_in[:, None] & k_in[None, :], other=0.0)
        if CODES is None:
            w = tl.load(w_row + column[None, :], tile.rows_in[:, None] & k_in[None, :], other=0.0)
        else:
            w = load_dequantized(operands, tile, (first + step) * C.BLOCK_K, sizes, C, CODES)
        acc = tl.dot(w, tl.trans(value), acc, input_precision=C.PRECISION)
        if C.PARTS > 1 and not C.SPLIT_K:
            left -= 1
            if left == 0:
                total += acc
                acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
                left = steps
    if C.PARTS > 1 and not C.SPLIT_K:
        acc = total + acc  # acc: zero, or the shorter last part
    if CODES is not None:
        acc *= sizes.factor  # a power of 2: exact
    return acc


@triton.jit
def add_parts(acc, operands, tile, C: tl.constexpr):
    """Store the sums of this part and increment the tile's counter. In the last program to do so, return the
    sum of all parts in ascending order and True; in the others, return `acc` and False."""
    number = tile.block * tl.num_programs(0) + tile.index
    i, t = tl.arange(0, C.BLOCK_N)[:, None], tl.arange(0, C.BLOCK_T)[None, :]
    place = operands.partial + number * C.PARTS * C.BLOCK_N * C.BLOCK_T + t * C.BLOCK_N + i
    tl.store(place + tile.part * C.BLOCK_N * C.BLOCK_T, acc, tile.t_in[None, :])
    tl.debug_barrier()  # all threads have stored before one increments the counter
    last = tl.atomic_add(operands.counters + number, 1, sem="acq_rel") == C.PARTS - 1
    if last:
        tl.store(operands.counters + number, 0)  # ready for the next launch
        acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
        for part in tl.static_range(C.PARTS):  # unrolled, so that the loads overlap
            at = place + part * C.BLOCK_N * C.BLOCK_T
            acc += tl.load(at, tile.t_in[None, :], other=0.0, cache_modifier=".cg")  # not from a stale L1
    return acc, last


@triton.jit
def token_slice(tile, INDEX: tl.constexpr, SLICE: tl.constexpr):
    """Return slice number INDEX, of SLICE tokens, of a tile [rows, tokens]. Registers cannot be indexed, so
    the tile is halved along its tokens repeatedly, which moves no data between threads."""
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
def load_residual(new, tile, s, T, N, C: tl.constexpr):
    """Load slice `s` [BLOCK_N, SLICE] of the residual stream that a tile is added to."""
    corner, at, inside = slice_of(tile, s, T, N, C.BLOCK_N, C)
    return tl.load(new.residual + corner + at, inside, other=0.0)


@triton.jit
def slice_of(tile, s, T, N, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return where slice `s` of a tile is in a tensor [T, N]: the offset of its corner, the offsets [COLUMNS,
    SLICE] from there, which fit 32 bits, and a mask of those in range."""
    first = tile.index * C.BLOCK_T + s * C.SLICE
    n, t = tl.arange(0, COLUMNS)[:, None], tl.arange(0, C.SLICE)[None, :]
    inside = (tile.block * COLUMNS + n < N) & (first + t < T)
    return first.to(tl.int64) * N + tile.block * COLUMNS, t * N + n, inside


@triton.jit
def epilogue(value, by, new, tile, s, T, N, C: tl.constexpr):
    """Apply the gate to slice `s` of a tile, with sums `value` [BLOCK_N, SLICE], and store it; with ADD, also
    for the next norm, whose weight is `by`."""
    if C.GATE != "":
        halves = tl.reshape(value, [C.BLOCK_N // 16, 2, 8, C.SLICE])
        gate, up = tl.split(tl.permute(halves, [0, 2, 3, 1]))
        sigmoid_arg = gate  # silu(x) = x / (1 + e^-x)
        if C.GATE == "gelu":  # gelu(x) (tanh approximation) = x / (1 + e^-y) for this y
            sigmoid_arg = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = tl.reshape(gate / (1.0 + tl.exp(-sigmoid_arg)) * up, [C.BLOCK_N // 2, C.SLICE])
    COLUMNS: tl.constexpr = value.shape[0]
    corner, at, inside = slice_of(tile, s, T, N, COLUMNS, C)
    value = value.to(new.x.dtype.element_ty)
    tl.store(new.x + corner + at, value, inside)
    if C.ADD:
        wide = value.to(tl.float32)
        tl.store(new.scaled + corner + at, (wide * by).to(new.scaled.dtype.element_ty), inside)
        t = tile.index * C.BLOCK_T + s * C.SLICE + tl.arange(0, C.SLICE)
        store_squares(wide, new.squares, tile.block * COLUMNS, t, T, N)


def new_counters(weight: Weight) -> Tensor:
    """Return counters for the products of a layer: one int32 per tile, 0 between launches. Launches with the
    same counters must not overlap; each layer has its own, so engines may run on different streams."""
    tiles = triton.cdiv(MAX_SPLIT_TOKENS, 32) * triton.cdiv(weight.shape[0], 64)  # of 32 tokens and 64 rows
    return torch.zeros(tiles, dtype=torch.int32, device=weight.device)


def product(
    source: Tensor | Residual, weight: Weight, bias: Tensor | None, counters: Tensor, gate: str = "",
    new: Outputs | None = None, out: Tensor | None = None, num_used: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `source` (a tensor, or the norm of a residual) @ weight.T + bias, or act(g) * u of its halves
    [g; u], in `out` if given. If `new` is given, store the result in it, plus its residual. `counters`: see
    `new_counters`; `num_used`: see `Batch`."""
    if isinstance(source, Tensor):
        x, squares, eps = source, None, 0.0
    else:
        x, squares, eps = source.scaled, source.squares, source.norm.eps
        assert x is not None  # set if `embed` used its kernel
    (T, K), N, gpu = x.shape, weight.shape[0], gpu_of(x)
    if new is None:
        new = Outputs(x.new_empty(T, N // 2 if gate else N) if out is None else out, num_used=num_used)
    if T == 0:
        return new.x
    tiling = choose_tiling(T, N, K, gpu, x.itemsize, weight.itemsize)
    rows, width, block_k, warps, stages, parts, part, split_k = tiling
    tiles, blocks, programs = triton.cdiv(T, width), triton.cdiv(N, rows), parts if split_k else 1
    partial = x.new_empty(tiles * blocks * programs * split_k, rows * width, dtype=torch.float32)
    launch_options = options(x, T, dots=True)
    constants = Constants(
        parts, split_k, width, rows, block_k, SLICE=min(width, 32, VALUES // rows),
        EVEN=K % block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=launch_options.pop("PDL"), GROUPS=0 if squares is None else len(squares), BIAS=bias is not None,
        GATE=gate, ADD=new.residual is not None, SKIP=num_used is not None,
    )  # fmt: skip
    operands = Operands(x, weight, bias, squares, partial, counters)
    sizes, codes = Sizes(N // 2 if gate else N, K, x.stride(0), eps), None
    if isinstance(weight, PackedCodes):
        operands = operands._replace(weight=weight.codes, words=weight.words)
        sizes = sizes._replace(shift=weight.shift, factor=weight.factor)
        codes = wrapped(weight.constants)
    _gemm[tiles, blocks, programs](
        operands, new, T, part // block_k, sizes, wrapped(constants), codes,
        num_warps=warps, num_stages=stages, **launch_options,
    )  # fmt: skip
    return new.x
