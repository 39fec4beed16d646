"""Requests with known keys, values and queries at every position, of which a test scores some part.

The same request can be scored alone or in a batch, with any number of cached tokens and of queries:
whatever is scored at a position must come out the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec.kernels.batch import MAX_TREE_NODES, Batch


@dataclass
class Texts:
    """R requests of up to L tokens. q [R, L, Hq, D]; cache [Hkv, num_blocks, block_size, D]; the
    pages of a request lie scattered, and what no request owns is NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor

    @classmethod
    def random(
        cls,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> Texts:
        g = torch.Generator().manual_seed(seed)
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks) + 2, generator=g).int()
        size = (kv_heads, len(order), block_size, head_dim)
        caches = [torch.full(size, float("nan"), dtype=dtype) for _ in range(2)]
        table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
        start = 0
        for r, count in enumerate(blocks):
            table[r, :count] = order[start : start + count]
            start += count
            for cache in caches:
                scale = 1.0 + r  # every request has a distribution of its own
                text = torch.randn(kv_heads, lengths[r], head_dim, generator=g) * scale + r
                for j in range(0, lengths[r], block_size):
                    page = text[:, j : j + block_size].to(dtype)
                    cache[:, table[r, j // block_size], : page.shape[1]] = page
        q = torch.randn(len(lengths), max(lengths), heads, head_dim, generator=g).to(dtype)
        return cls(q, caches[0], caches[1], table)

    def clean(self) -> Texts:
        """In float64 and without NaN, for `naive`, which reads whole pages."""
        return Texts(
            self.q.double(),
            self.k_cache.double().nan_to_num(),
            self.v_cache.double().nan_to_num(),
            self.block_table.clamp(min=0),
        )

    def rows(
        self,
        parts: list[tuple[int, int, int]],
        padded: bool = True,
        max_q_len: int | None = None,
        trees: list[list[int]] | None = None,
    ) -> tuple[Batch, Tensor]:
        """Rows of the `parts` (request, cached tokens, queries), and their queries [T, Hq, D].

        With `padded`, rows have equal length, and padding has slot -1 and NaN as query. `trees` gives
        the parent of each query of each row.
        """
        widest = max_q_len or max(n for _, _, n in parts)
        starts, T = [], 0
        for _, _, n in parts:
            starts.append(T)
            T += widest if padded else n
        block_size = self.k_cache.shape[2]
        positions, slots = torch.zeros(T, dtype=torch.int32), torch.full((T,), -1, dtype=torch.int32)
        ancestors = torch.zeros(T, dtype=torch.int64) if trees else None
        q = torch.full((T, *self.q.shape[2:]), float("nan"), dtype=self.q.dtype)
        for b, (r, base, n) in enumerate(parts):
            for i in range(n):
                t, j = starts[b] + i, base + i
                q[t] = self.q[r, j]
                slots[t] = self.block_table[r, j // block_size] * block_size + j % block_size
                positions[t] = j
                if trees and ancestors is not None:
                    parent = trees[b][i]
                    depth = base if parent < 0 else int(positions[starts[b] + parent]) + 1
                    positions[t] = depth
                    mask = 0 if parent < 0 else int(ancestors[starts[b] + parent])
                    ancestors[t] = mask | (1 << i if i < 63 else -1 << 63)
        i32 = torch.int32
        rows = Batch(
            positions=positions,
            slots=slots,
            block_table=self.block_table[[r for r, _, _ in parts]].contiguous(),
            q_start=torch.tensor(starts, dtype=i32),
            q_len=torch.tensor([n for _, _, n in parts], dtype=i32),
            base_len=torch.tensor([base for _, base, _ in parts], dtype=i32),
            max_q_len=widest,
            max_kv_len=max(base + n for _, base, n in parts),
            ancestors=ancestors,
            prefill=widest > MAX_TREE_NODES,
        )
        return rows, q


def scored(rows: Batch, flat: Tensor) -> Tensor:
    """The tokens of a flat batch that are not padding."""
    index = [s + i for s, n in zip(rows.q_start.tolist(), rows.q_len.tolist()) for i in range(n)]
    return flat[index]
