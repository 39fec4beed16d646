"""A decode step in plain PyTorch: the peer that everybody can write, for `torch.compile` and CUDA graphs.

As in gpt-fast: fused projections, `F.linear`, `scaled_dot_product_attention` over a static cache with a
mask, and nothing that waits for the host. The queries of a group of heads are taken together, so that torch
may use a kernel that knows masks but no groups, and keys and values are read once. A step scores Q tokens
of B rows at the same positions and returns the likeliest next token of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanospec.models.config import ModelConfig


class PlainModel:
    """A decoder of a shape with random weights, and its cache.

    Attributes:
        caches: of each layer keys and values, [2, B, Hkv, S, D].
    """

    def __init__(
        self, config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        H, D = config.hidden_size, config.head_dim
        q, kv = config.num_heads * D, config.num_kv_heads * D

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5

        self.embedding = random(config.vocab_size, H)
        self.head = self.embedding if config.tie_word_embeddings else random(config.vocab_size, H)
        self.layers = [
            (random(q + 2 * kv, H), random(H, q), random(2 * config.intermediate_size, H),
             random(H, config.intermediate_size))
            for _ in range(config.num_layers)
        ]  # fmt: skip
        self.caches = [
            torch.randn(2, batch, config.num_kv_heads, length, D, device=device, dtype=dtype)
            for _ in range(config.num_layers)
        ]
        self.ones, self.head_ones = (torch.ones(n, device=device, dtype=dtype) for n in (H, D))
        turns = 1e4 ** (torch.arange(0, D, 2, device=device) / D)
        angles = torch.arange(length, device=device)[:, None] / turns
        self.cos, self.sin = (torch.cat((f(angles), f(angles)), 1).to(dtype) for f in (torch.cos, torch.sin))
        self.places = torch.arange(length, device=device)

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Score ids [B, Q] at positions [Q]; the likeliest next token of each, [B, Q]."""
        c = self.config
        B, Q = ids.shape
        heads, kv_heads, D, eps = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
        mask = (self.places <= positions[:, None]).repeat(heads // kv_heads, 1)  # [G Q, S]
        cos, sin = self.cos[positions], self.sin[positions]
        x = F.embedding(ids, self.embedding)
        for (w_qkv, w_o, w_gate_up, w_down), cache in zip(self.layers, self.caches):
            qkv = F.linear(F.rms_norm(x, (c.hidden_size,), self.ones, eps), w_qkv)
            qkv = qkv.view(B, Q, heads + 2 * kv_heads, D).transpose(1, 2)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            if c.qk_norm:
                q, k = (F.rms_norm(part, (D,), self.head_ones, eps) for part in (q, k))
            q, k = (part * cos + _half_turned(part) * sin for part in (q, k))
            cache[0].index_copy_(2, positions, k)
            cache[1].index_copy_(2, positions, v)
            grouped = q.reshape(B, kv_heads, -1, D)  # [B, Hkv, G Q, D]
            out = F.scaled_dot_product_attention(grouped, cache[0], cache[1], attn_mask=mask)
            x = x + F.linear(out.view(B, heads, Q, D).transpose(1, 2).reshape(B, Q, heads * D), w_o)
            h = F.linear(F.rms_norm(x, (c.hidden_size,), self.ones, eps), w_gate_up)
            gate, up = h.chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w_down)
        return F.linear(F.rms_norm(x, (c.hidden_size,), self.ones, eps), self.head).argmax(-1)


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
