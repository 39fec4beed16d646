"""Phi-3, 3.5 and Phi-4-mini: a Llama whose checkpoints fuse q, k, v and gate, up; longrope for long contexts.

Phi-4-mini rotates a part of each head only, pairs (i, i + R/2) of its first R numbers. What q . k is does not
change if the numbers of q's and k's heads are put into another order, the same for both: `convert` puts these
pairs D/2 apart, where the kernels look for them, and the others get angles of 0 (`Rope` in `config.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from .base import Family, Raw, read, rope, rope_entry, value

FUSED = {f"self_attn.{part}_proj": "self_attn.qkv_proj" for part in "qkv"}
FUSED |= {f"mlp.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")}


class Phi3(Family):
    def config(self, raw: Raw) -> ModelConfig:
        longest = value(raw, "max_position_embeddings", int)
        window = value(raw, "sliding_window", int, longest)
        given = rope_entry(raw)
        if given.get("rope_type", given.get("type")) in ("su", "yarn"):  # as early files call it
            raw = {**raw, "rope_scaling": {**given, "rope_type": "longrope"}}
        windows = (window if window < longest else None,) * value(raw, "num_hidden_layers", int)
        return read(raw, windows=windows, rope=rope(raw, partial=True))

    def stored_name(self, name: str) -> str:
        for ours, whole in FUSED.items():
            name = name.replace(ours, whole)
        return name

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        turned = config.rope.rotated(config.head_dim)
        if turned == config.head_dim or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor
        heads = tensor.unflatten(0, (-1, config.head_dim))
        pairs, rest = heads[:, :turned].chunk(2, 1), heads[:, turned:].chunk(2, 1)
        return torch.cat((pairs[0], rest[0], pairs[1], rest[1]), 1).flatten(0, 1)
