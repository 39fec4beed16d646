"""Bar the tokens that a grammar does not allow: their logits become -inf, before all that reads them.

    logits   [T, V]       bf16, fp16 or fp32, changed in place
    allowed  [M, W] int32 masks: bit i % 32 of word i // 32 says whether token i may come
    at       [T] int32    which mask counts for each row of logits; -1: none, and the row is left alone

Tokens for which a mask has no bit are barred. What is allowed keeps its logit to the bit, so that a row of
the result depends on nothing but its own logits and mask.

Kernel: one program per row and 4096 tokens; it reads no logits, and writes those that are barred. On a CPU
`native` does so in C++ (`native/sampling.cpp`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import use_native, use_triton
from ..native.build import call

CHUNK = 4096  # tokens per program


def mask(logits: Tensor, allowed: Tensor, at: Tensor) -> None:
    """See the module docstring."""
    if use_triton(logits):
        return launch(logits, allowed, at)
    return (native if use_native(logits, torch.bfloat16, torch.float32) else naive)(logits, allowed, at)


def naive(logits: Tensor, allowed: Tensor, at: Tensor) -> None:
    V = logits.shape[1]
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    for t, m in enumerate(at.tolist()):
        if m >= 0:
            may = (allowed[m, :, None] >> bit & 1).flatten()[:V].bool()
            logits[t, : len(may)].masked_fill_(~may, float("-inf"))
            logits[t, len(may) :] = float("-inf")


def native(logits: Tensor, allowed: Tensor, at: Tensor) -> None:
    call(
        "nanospec_mask", logits, logits.stride(0), logits.dtype == torch.bfloat16, *logits.shape,
        allowed, allowed.stride(0), allowed.shape[1], at, torch.get_num_threads(),
    )  # fmt: skip


@triton.jit
def _mask(logits, stride, vocab, masks, at, CHUNK: tl.constexpr):
    t = tl.program_id(0)
    m = tl.load(at + t)
    if m < 0:
        return
    allowed, width, words = masks
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(allowed + m.to(tl.int64) * width + ids // 32, ids // 32 < words, other=0)
    barred = (word >> (ids % 32)) & 1 == 0
    tl.store(logits + t.to(tl.int64) * stride + ids, float("-inf"), barred & (ids < vocab))


def launch(logits: Tensor, allowed: Tensor, at: Tensor) -> None:
    T, V = logits.shape
    masks = allowed, allowed.stride(0), allowed.shape[1]
    if T:
        grid = T, triton.cdiv(V, CHUNK)
        _mask[grid](logits, logits.stride(0), V, masks, at, CHUNK=CHUNK, num_warps=4)
