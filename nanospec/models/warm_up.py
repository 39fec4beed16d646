"""Compile the kernels of prompts before the first request.

Capturing a step compiles its kernels, but a prompt chunk can have any number of tokens. The tiling of a
product depends on it, attention on the queries per row and on whether programs share a long context, and all
kernels on whether they use dependent launch.
"""

from collections.abc import Callable, Hashable

import torch
from tqdm import tqdm

from ..kernels.batch import Batch, Chunk
from ..kernels.launch import gpu_of, use_triton
from ..kernels.table import Table
from .decoder import Model


@torch.inference_mode()
def warm_up(model: Model, table: Table, max_tokens: int, write: Callable[[Batch], None]) -> None:
    """Run `write` on a prompt chunk for each kernel that prompts of up to `max_tokens` tokens use, at the
    beginning and at the end of the context. Call it before the first request, as `write` overwrites block 0
    of the KV cache."""
    if not use_triton(model.norm.weight):
        return
    context, runs = table.max_context, list[list[Chunk]]()
    for size in chunk_sizes(model, min(max_tokens, table.num_rows * context)):
        starts = range(0, size, context)
        runs.append([Chunk(row, 0, min(size - start, context)) for row, start in enumerate(starts)])
        if size < context:
            runs.append([Chunk(0, context - size, size)])
    for chunks in tqdm(runs, desc="Compiling kernels", disable=None, leave=False):
        write(Batch.from_chunks(table, chunks))


def chunk_sizes(model: Model, limit: int) -> list[int]:
    """Return numbers of tokens, up to `limit`, that together use every kernel of prompt chunks."""
    from ..kernels.layer.split_kv import split_kv  # not needed on a CPU
    from ..kernels.layer.tiling import choose_tiling

    c, gpu = model.config, gpu_of(model.norm.weight)
    heads = c.num_heads, c.num_kv_heads, c.head_dim
    weights = [linear.weight for linear in model.layers[0].linears]

    def kernels_of(T: int) -> Hashable:
        tilings = (choose_tiling(T, *w.shape, gpu, model.dtype.itemsize, w.itemsize) for w in weights)
        return gpu.uses_pdl(T), split_kv(1, T, T, heads, gpu).columns, *tilings

    # The smallest of each class, and the limit, as tensor parallelism reduces long chunks in slices.
    return sorted({limit, *{kernels_of(T): T for T in range(limit, 0, -1)}.values()})
