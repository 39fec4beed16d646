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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import LINE, options, prefetch
from ..launch import NUM_TICKETS, ONE_SHAPE, arch, next_power_of_2, tickets
from .stream import Stream
from .tiling import MACHINES, Tiling, plan

VALUES = 4096  # of a tile that a program finishes at a time
AHEAD = 16 << 20  # bytes of a weight that all programs together ask for before the kernel ahead has ended


@triton.jit
def paired_rows(block, half, ROWS: tl.constexpr):
    """(weight row [ROWS], its pair's number [ROWS]) of a tile of pairs: row and row + half are a pair.
    Pair p stands for rows (p // half) * 2 * half + p % half and that + half."""
    i = tl.arange(0, ROWS)
    pair = block * (ROWS // 2) + i // 16 * 8 + i % 8
    return pair // half * (2 * half) + i // 8 % 2 * half + pair % half, pair


@triton.jit
def split_pairs(tile, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first and second rows of the pairs of a tile [ROWS, WIDTH], each [ROWS / 2, WIDTH] by pair."""
    both = tl.permute(tl.reshape(tile, [ROWS // 16, 2, 8, WIDTH]), [0, 2, 3, 1])
    first, second = tl.split(both)
    return tl.reshape(first, [ROWS // 2, WIDTH]), tl.reshape(second, [ROWS // 2, WIDTH])


@triton.jit
def prefetch_weight(weight, rows, first, K, LINES: tl.constexpr, PDL: tl.constexpr):
    """Ask for the first `LINES` cache lines of each of the `rows`, from column `first` on."""
    if PDL and LINES > 0:
        WIDTH: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
        column = tl.minimum(first + tl.arange(0, LINES) * WIDTH, K - 1)
        prefetch(weight + rows.to(tl.int64)[:, None] * K + column[None, :], PDL)


@triton.jit
def products(
    x, weight, rows, rows_in, t, t_in, K, x_stride, split, steps, SPLITS: tl.constexpr, APART: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_T] over K for weight `rows` [BLOCK_N] and tokens `t` [BLOCK_T], of which those
    with `rows_in` and `t_in` exist: of part `split` only where parts run apart. A part has `steps` steps of
    BLOCK_K columns."""
    k = tl.arange(0, BLOCK_K)
    x_row = x + t.to(tl.int64)[:, None] * x_stride
    w_row = weight + rows.to(tl.int64)[:, None] * K
    count = tl.cdiv(K, BLOCK_K)
    first = 0
    if APART:
        first = split * steps
        count = tl.minimum(count - first, steps)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    left = steps
    for step in range(tl.maximum(count, 1)):  # known to run, or ptxas lets no two wgmma overlap
        column = (first + step) * BLOCK_K + k  # known to be aligned, unlike a running sum
        k_in = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
        value = tl.load(x_row + column[None, :], t_in[:, None] & k_in[None, :], other=0.0)
        w = tl.load(w_row + column[None, :], rows_in[:, None] & k_in[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
        if SPLITS > 1 and not APART:
            left -= 1
            if left == 0:
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
                left = steps
    if SPLITS > 1 and not APART:
        acc = total + acc  # zero, or the last part, which is shorter
    return acc


@triton.jit
def last_of_parts(
    acc, partial, tickets, T, tile, block, split, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leave the sums of this part in `partial` [SPLITS, T, blocks * BLOCK_N]; whether all others have."""
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    width = tl.num_programs(1) * BLOCK_N
    corner = (split * T + tile * BLOCK_T).to(tl.int64) * width + block * BLOCK_N
    at = tl.arange(0, BLOCK_T)[None, :] * width + tl.arange(0, BLOCK_N)[:, None]
    tl.store(partial + corner + at, acc, t[None, :] < T)
    tl.debug_barrier()  # all threads have stored before one of them says so
    ticket = tickets + block * tl.num_programs(0) + tile
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(ticket, 0)  # ready for the next launch
    return last


@triton.jit
def sum_of_parts(partial, T, tile, block, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """All parts in ascending order. Unrolled, so that their loads are under way together."""
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    width = tl.num_programs(1) * BLOCK_N
    at = tl.arange(0, BLOCK_T)[None, :] * width + tl.arange(0, BLOCK_N)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for split in tl.static_range(SPLITS):
        corner = (split * T + tile * BLOCK_T).to(tl.int64) * width + block * BLOCK_N
        acc += tl.load(partial + corner + at, t[None, :] < T, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def token_slice(tile, INDEX: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens INDEX * SLICE and on of a tile [ROWS, WIDTH]. Registers cannot be indexed, so the tile is
    halved along its tokens until SLICE are left; both halves of a value's pair lie in the same thread."""
    if WIDTH > SLICE:
        left, right = tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, WIDTH // 2]), [0, 2, 1]))
        HALF: tl.constexpr = WIDTH // 2 // SLICE
        if INDEX < HALF:
            tile = token_slice(left, INDEX, SLICE, ROWS, WIDTH // 2)
        else:
            tile = token_slice(right, INDEX - HALF, SLICE, ROWS, WIDTH // 2)
    return tile


class Setup(NamedTuple):
    """What the launch of a product needs beside its operands.

    Attributes:
        grid: tiles of tokens, blocks of weight rows, parts of K that run apart.
        partial: [parts, T, blocks * BLOCK_N] float32 for their sums. None where parts do not run apart.
        tickets: [NUM_TICKETS] int32, see `launch.py`. None likewise.
        steps: of BLOCK_K columns to a part.
        constants: of the kernel, and the options of its launch.
    """

    grid: tuple[int, int, int]
    partial: Tensor | None
    tickets: Tensor | None
    steps: int
    constants: dict[str, Any]


def prepare(x: Tensor, weight: Tensor, unit: int = 1) -> Setup:
    """Cut x [T, K] @ weight [N, K].T into programs that hold whole groups of `unit` rows of the weight."""
    (T, K), N, target = x.shape, weight.shape[0], arch(x)
    tiling = plan(T, N, K, target, x.itemsize, unit)
    tiles, blocks = triton.cdiv(T, tiling.width), triton.cdiv(N, tiling.rows)
    partial = counters = None
    if tiling.apart:
        partial = torch.empty(tiling.splits, T, blocks * tiling.rows, dtype=torch.float32, device=x.device)
        counters = tickets(x.device, "product")
        if blocks * tiles > NUM_TICKETS:
            raise ValueError(f"{blocks * tiles} output tiles exceed the {NUM_TICKETS} tickets.")
    constants = {
        "SPLITS": tiling.splits, "APART": tiling.apart, "BLOCK_T": tiling.width, "BLOCK_N": tiling.rows,
        "BLOCK_K": tiling.block_k, "SLICE": min(tiling.width, 32, VALUES // tiling.rows),
        "EVEN": K % tiling.block_k == 0, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "LINES": _lines(tiling, blocks * (tiling.splits if tiling.apart else 1), x.itemsize, target),
        "num_warps": tiling.warps, "num_stages": tiling.stages, **options(x), **ONE_SHAPE.get(target, {}),
    }  # fmt: skip
    grid = (tiles, blocks, tiling.splits if tiling.apart else 1)
    return Setup(grid, partial, counters, tiling.part // tiling.block_k, constants)


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


def check_product(x: Tensor, weight: Tensor, **extras: tuple[Tensor | None, torch.Size]) -> None:
    """Refuse what the kernel would read wrongly."""
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError("x must be contiguous in its last dimension, the weight in all.")
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {list(weight.shape)}.")
    for name, (tensor, shape) in extras.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            name = name.replace("_", " ")
            raise ValueError(f"The {name} must be contiguous {list(shape)}, not {list(tensor.shape)}.")
