"""What the matrix products of a layer share: `gemm.py`, and `qkv_rope.py`, which goes on with RoPE.

    sums [N, T] of weight [N, K] @ x [T, K].T, tile by tile

The bits of a token must not depend on the number of tokens beside it, so everything that fixes a sum's
order depends on the weight's shape only. "Rows" here are those of the weight:

* K is cut into parts of a fixed size (`tiling.py`). Each part is summed in one accumulator in ascending
  order, the parts are added in ascending order. For few tokens the parts run *apart*: each is a program, and
  the one that happens to finish last adds them; no floating-point atomics, no second launch. For many
  tokens *one* program runs them all, adds a part to the total when it is done, and keeps nothing in memory.
* The weight is the left operand: its rows are the rows of the matrix instruction, tokens the columns.
  So the instruction is the same family for 1 token and for 2,000 (only its width differs), and few
  tokens waste little of it.

Some epilogues need two rows of the weight at once (gate and up; the two halves of a head that RoPE
rotates). Such rows lie 8 apart in a program's tile, where a matrix instruction leaves both to the same
thread: `paired_rows`, `split_pairs`.

Calls on one device must not overlap on several streams: they share the tickets by which the last
program knows itself.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import LINE, NUM_TICKETS, ONE_SHAPE, arch, next_power_of_2, options, prefetch, tickets, wrapped
from .stream import Stream, inverse_rms, inverse_rms_of_many, load_squares
from .tiling import MACHINES, Tiling, choose_tiling

VALUES = 4096  # of a tile that a program finishes at a time
AHEAD = 16 << 20  # bytes of a weight that all programs together ask for before the kernel ahead has ended

# x [T, K], weight [N, K], bias [N]; the sums of squares of `Stream`, for the norm of x. None for what is not
# there.
Operands = namedtuple("Operands", "x weight bias squares")

# Room for parts that run apart, and their tickets: see `Setup`.
Apart = namedtuple("Apart", "partial tickets")

Sizes = namedtuple("Sizes", "N K x_stride")

# A program's tile of tokens, block of weight rows and part of K; these tokens t [BLOCK_T] and rows [BLOCK_N],
# and which of them exist.
Tile = namedtuple("Tile", "index block split t t_in rows rows_in")

# What a kernel is compiled for: how the product is cut, see `tiling.py`; SLICE tokens that it finishes at a
# time, LINES of each weight row that it asks for ahead, GROUPS of sums of squares; what its file says.
Constants = namedtuple(
    "Constants",
    "SPLITS APART BLOCK_T BLOCK_N BLOCK_K SLICE EVEN PRECISION LINES PDL GROUPS BIAS GATE ADD HEAD_DIM NORM",
    defaults=(0, False, 0, False),
)


@triton.jit
def paired_rows(block, half, ROWS: tl.constexpr):
    """(weight row [ROWS], its pair's number [ROWS]) of a tile of pairs: row and row + half are a pair.
    Pair p stands for rows (p // half) * 2 * half + p % half and that + half."""
    i = tl.arange(0, ROWS)
    pair = block * (ROWS // 2) + i // 16 * 8 + i % 8
    return pair // half * (2 * half) + i // 8 % 2 * half + pair % half, pair


@triton.jit
def split_pairs(tile):
    """Return the first and the second rows of a tile of pairs [ROWS, WIDTH], each [ROWS / 2, WIDTH]."""
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1]
    both = tl.permute(tl.reshape(tile, [ROWS // 16, 2, 8, WIDTH]), [0, 2, 3, 1])
    first, second = tl.split(both)
    return tl.reshape(first, [ROWS // 2, WIDTH]), tl.reshape(second, [ROWS // 2, WIDTH])


@triton.jit
def prefetch_weight(weight, rows, first, K, C: tl.constexpr):
    """Ask for the first LINES cache lines of each of the rows [BLOCK_N], from column `first` on."""
    if C.PDL and C.LINES > 0:
        WIDTH: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
        column = tl.minimum(first + tl.arange(0, C.LINES) * WIDTH, K - 1)
        prefetch(weight + rows.to(tl.int64)[:, None] * K + column[None, :], C.PDL)


@triton.jit
def early_scale(operands, tile, T, K, eps, C: tl.constexpr):
    """Return what `late_scale` needs: few sums of squares are loaded before the product and added behind it,
    many are added here, or there if only the last of several programs needs them."""
    scale = tl.full([1, C.BLOCK_T], 1.0, tl.float32)
    if C.GROUPS > 0 and C.BLOCK_T <= 32:
        scale = load_squares(operands.squares, tile.t, tile.t_in, T, C.GROUPS)
    elif C.GROUPS > 0 and not C.APART:
        scale = inverse_rms_of_many(operands.squares, tile.t, tile.t_in, T, K, eps, C.GROUPS)
    return scale


@triton.jit
def late_scale(scale, operands, tile, T, K, eps, C: tl.constexpr):
    """Return the factors [1, BLOCK_T] of the tokens: 1 / rms, or 1 without a norm."""
    if C.GROUPS > 0 and C.BLOCK_T <= 32:
        scale = inverse_rms(scale, K, eps)
    elif C.GROUPS > 0 and C.APART:
        scale = inverse_rms_of_many(operands.squares, tile.t, tile.t_in, T, K, eps, C.GROUPS)
    return scale


@triton.jit
def products(operands, tile, sizes, steps, C: tl.constexpr):
    """Return the sums [BLOCK_N, BLOCK_T] of a tile over K, or a part of K where parts run apart. A part has
    `steps` steps of BLOCK_K columns."""
    k = tl.arange(0, C.BLOCK_K)
    x_row = operands.x + tile.t.to(tl.int64)[:, None] * sizes.x_stride
    w_row = operands.weight + tile.rows.to(tl.int64)[:, None] * sizes.K
    count = tl.cdiv(sizes.K, C.BLOCK_K)
    first = 0
    if C.APART:
        first = tile.split * steps
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
        if C.SPLITS > 1 and not C.APART:
            left -= 1
            if left == 0:
                total += acc
                acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
                left = steps
    if C.SPLITS > 1 and not C.APART:
        acc = total + acc  # zero, or the last part, which is shorter
    return acc


@triton.jit
def last_of_parts(acc, apart, tile, T, C: tl.constexpr):
    """Store the sums of this part; return whether all other parts have been stored."""
    corner, at = place_of_part(tile.split, tile, T, C)
    tl.store(apart.partial + corner + at, acc, tile.t[None, :] < T)
    tl.debug_barrier()  # all threads have stored before one of them says so
    ticket = apart.tickets + tile.block * tl.num_programs(0) + tile.index
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == C.SPLITS - 1
    if last:
        tl.store(ticket, 0)  # ready for the next launch
    return last


@triton.jit
def sum_of_parts(apart, tile, T, C: tl.constexpr):
    """Add all parts in ascending order. Unrolled, so that their loads are under way together."""
    acc = tl.zeros([C.BLOCK_N, C.BLOCK_T], tl.float32)
    for split in tl.static_range(C.SPLITS):
        corner, at = place_of_part(split, tile, T, C)
        acc += tl.load(apart.partial + corner + at, tile.t[None, :] < T, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def place_of_part(split, tile, T, C: tl.constexpr):
    """Return where a tile of a part begins in `partial` [SPLITS, T, blocks * BLOCK_N], and offsets from
    there [BLOCK_N, BLOCK_T]."""
    width = tl.num_programs(1) * C.BLOCK_N
    corner = (split * T + tile.index * C.BLOCK_T).to(tl.int64) * width + tile.block * C.BLOCK_N
    return corner, tl.arange(0, C.BLOCK_T)[None, :] * width + tl.arange(0, C.BLOCK_N)[:, None]


@triton.jit
def finished_slice(acc, scale, operands, tile, INDEX: tl.constexpr, C: tl.constexpr):
    """Return slice INDEX [BLOCK_N, SLICE] of the sums times the factors of their tokens, plus the bias."""
    part = token_slice(acc, INDEX, C.SLICE) * token_slice(scale, INDEX, C.SLICE)
    if C.BIAS:
        part += tl.load(operands.bias + tile.rows, tile.rows_in, other=0.0).to(tl.float32)[:, None]
    return part


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


class Setup(NamedTuple):
    """What the launch of a product needs.

    Attributes:
        grid: tiles of tokens, blocks of weight rows, parts of K that run apart.
        operands, sizes: see above.
        apart: [parts, T, blocks * BLOCK_N] float32 for the sums of parts that run apart, and [NUM_TICKETS]
            int32, see `launch.py`; None where no parts do.
        steps: of BLOCK_K columns to a part.
        eps: of the norm of x, 0 if there is none.
        constants: of the kernel.
        options: of its launch.
    """

    grid: tuple[int, int, int]
    operands: Operands
    apart: Apart
    sizes: Sizes
    steps: int
    eps: float
    constants: Constants
    options: dict[str, Any]


def prepare(
    source: Tensor | Stream, weight: Tensor, bias: Tensor | None, unit: int = 1, **epilogue: Any
) -> Setup:
    """Cut the product of a tensor [T, K], or a stream's norm, and a weight [N, K] into programs that hold
    whole groups of `unit` rows of the weight; `epilogue` are the constants of what comes after it."""
    x, squares, groups, eps = operand(source)
    (T, K), N, target = x.shape, weight.shape[0], arch(x)
    check_product(x, weight)
    check_shapes(bias=(bias, weight.shape[:1]))
    tiling = choose_tiling(max(T, 1), N, K, target, x.itemsize, unit)
    tiles, blocks = triton.cdiv(T, tiling.width), triton.cdiv(N, tiling.rows)
    apart, num_apart = Apart(None, None), tiling.splits if tiling.apart else 1
    if tiling.apart:
        partial = torch.empty(tiling.splits, T, blocks * tiling.rows, dtype=torch.float32, device=x.device)
        apart = Apart(partial, tickets(x.device, "product"))
        if blocks * tiles > NUM_TICKETS:
            raise ValueError(f"{blocks * tiles} output tiles exceed the {NUM_TICKETS} tickets.")
    given = options(x)
    constants = Constants(
        SPLITS=tiling.splits, APART=tiling.apart, BLOCK_T=tiling.width, BLOCK_N=tiling.rows,
        BLOCK_K=tiling.block_k, SLICE=min(tiling.width, 32, VALUES // tiling.rows),
        EVEN=K % tiling.block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        LINES=_lines(tiling, blocks * num_apart, x.itemsize, target), PDL=given.pop("PDL"),
        GROUPS=groups, BIAS=bias is not None, **epilogue,
    )  # fmt: skip
    given |= {"num_warps": tiling.warps, "num_stages": tiling.stages, **ONE_SHAPE.get(target, {})}
    columns = N // 2 if constants.GATE else N
    return Setup(
        (tiles, blocks, num_apart), Operands(x, weight, bias, squares), apart, Sizes(columns, K, x.stride(0)),
        tiling.part // tiling.block_k, eps, wrapped(constants), given,
    )  # fmt: skip


def _lines(tiling: Tiling, programs: int, itemsize: int, target: str) -> int:
    """Cache lines of each weight row that a program asks for ahead: of its part, up to 16, a power of two."""
    together = min(programs, 3 * MACHINES[target].processors)
    most = min(AHEAD // (together * tiling.rows * LINE.value), tiling.part * itemsize // LINE.value, 16)
    return next_power_of_2(most + 1) // 2


def operand(source: Tensor | Stream) -> tuple[Tensor, Tensor | None, int, float]:
    """(x [T, K], sums of squares, number of these, eps) of a product with a tensor or a stream's norm."""
    if isinstance(source, Tensor):
        return source, None, 0, 0.0
    if source.scaled is None or source.squares is None:
        raise ValueError("The kernels need a stream that a kernel wrote: begin with `embed`.")
    return source.scaled, source.squares, len(source.squares), source.norm.eps


def check_product(x: Tensor, weight: Tensor) -> None:
    """Refuse what the kernel would read wrongly."""
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError("x must be contiguous in its last dimension, the weight in all.")
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {list(weight.shape)}.")


def check_shapes(**extras: tuple[Tensor | None, torch.Size]) -> None:
    """Refuse tensors that are not contiguous and of these shapes."""
    for name, (tensor, shape) in extras.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            name = name.replace("_", " ")
            raise ValueError(f"The {name} must be contiguous {list(shape)}, not {list(tensor.shape)}.")
