"""Attention of long chains over the paged KV cache: prefill, whole or in chunks.

Shapes as in `attention.py`, which also has `naive`. Rows may have different lengths and different cached
prefixes. Chains only: `Batch.ancestors` must be None.

Kernel: one program per (row, query head, tile of queries) walks the visible keys tile by tile with an
online softmax (Dao et al., 2022). The key tiles before the diagonal need no mask. Its bits need not
equal those of `split_kv.py`, whose rows are short.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import MAX_QUERIES
from ..launch import LOG2_E, arch, check_attention, next_power_of_2
from .plan import Plan

# (queries per tile, keys per tile, warps, stages) by architecture, then by padded head dimension.
CONFIGS = {
    "sm_80": {64: (128, 64, 8, 3), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2)},
    "sm_90": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    "sm_100": {64: (128, 64, 8, 2), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    "gfx942": {64: (128, 64, 4, 1), 128: (128, 64, 4, 1), 256: (64, 32, 4, 1)},
}
FP32_CONFIG = (32, 32, 4, 1)  # for tests


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill(
    q, k_cache, v_cache, out, batch, table_stride, head_stride, num_heads, window, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads first: programs that run together share keys. Late tiles, which are the long ones, first.
    head, b = tl.program_id(0), tl.program_id(2)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    n = tl.load(batch.q_len + b)
    if first >= n:
        return
    base = tl.load(batch.base_len + b)
    i = first + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    token = (tl.load(batch.q_start + b) + i).to(tl.int64)
    at = (token[:, None] * num_heads + head) * HEAD_DIM + d[None, :]
    inside = (i < n)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at, inside, other=0.0)
    keys = k_cache + (head // GROUP).to(tl.int64) * head_stride
    values = v_cache + (head // GROUP).to(tl.int64) * head_stride
    pages = batch.block_table + b.to(tl.int64) * table_stride

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_Q], -1e30, tl.float32)
    z = tl.zeros([BLOCK_Q], tl.float32)
    kv_len = base + tl.minimum(first + BLOCK_Q, n)
    diagonal = (base + first) // BLOCK_N * BLOCK_N  # every query of the tile sees what is before
    begin = 0
    if WINDOW:
        begin = tl.maximum(base + first - window + 1, 0) // BLOCK_N * BLOCK_N
    end = diagonal
    for masked in tl.static_range(2):
        for tile in range(begin, end, BLOCK_N):
            j = tile + tl.arange(0, BLOCK_N)
            there = j < kv_len
            page = tl.load(pages + j // BLOCK_SIZE, there, other=0).to(tl.int64)
            entry = (page * BLOCK_SIZE + j % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None, :]
            full = there[:, None]
            if HEAD_DIM < BLOCK_D:
                full = full & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + entry, full, other=0.0)  # [BLOCK_N, D]
            v = tl.load(values + entry, full, other=0.0)
            s = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_Q, BLOCK_N]
            if masked == 1 or WINDOW:
                visible = j[None, :] <= base + i[:, None]
                if WINDOW:
                    visible = visible & (j[None, :] > base + i[:, None] - window)
                s = tl.where(visible, s, float("-inf"))
            # A finite floor: a query may see nothing of a tile, and inf - inf is not a number.
            new_m = tl.maximum(m, tl.maximum(tl.max(s, 1), -1e30))
            p = tl.exp2(s - new_m[:, None])
            alpha = tl.exp2(m - new_m)
            z = z * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            m = new_m
        begin, end = tl.maximum(diagonal, begin), kv_len
    tl.store(out + at, (acc / tl.where(i < n, z, 1.0)[:, None]).to(out.dtype.element_ty), inside)


def launch(q: Tensor, cache: Tensor, plan: Plan, scale: float) -> Tensor:
    check_attention(q, cache)
    batch, window = plan.batch, plan.window
    if batch.ancestors is not None:
        raise ValueError(
            f"Prefill attention is for chains; a tree has at most {MAX_QUERIES} queries per row."
        )
    num_heads, head_dim = q.shape[1:]
    k_cache, v_cache = cache
    num_kv_heads, _, block_size, _ = k_cache.shape
    block_d = max(next_power_of_2(head_dim), 64)
    if q.dtype == torch.float32:
        block_q, block_n, warps, stages = FP32_CONFIG
    else:
        block_q, block_n, warps, stages = CONFIGS[arch(q)][block_d]
    out = torch.empty_like(q)
    _prefill[(num_heads, triton.cdiv(batch.max_q_len, block_q), batch.num_rows)](
        q, k_cache, v_cache, out, batch.tensors, batch.block_table.stride(0), k_cache.stride(0),
        num_heads, window or 0, scale * LOG2_E,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        WINDOW=window is not None, BLOCK_Q=block_q, BLOCK_N=block_n, BLOCK_D=block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
