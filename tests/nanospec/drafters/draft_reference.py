"""DFlash and EAGLE-3 in plain PyTorch and float64: each distribution is computed from the whole text.

Written after dflash/model.py of z-lab/dflash, eagle/model/cnets.py of SafeAILab/EAGLE, and the model
definitions of vllm-project/speculators, with which it agrees."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

GetStates = Callable[[Sequence[int]], Tensor]
"""Returns the target's hidden states [T, n * H] of a text."""


class Reference:
    """The drafter in a folder, for a target with `embedding` and `head` [V, H]."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor, states: GetStates) -> None:
        self.config, stored = (
            json.loads((folder / "config.json").read_text()),
            load_file(folder / "model.safetensors"),
        )
        self.weights = {
            name.replace("midlayer.", "layers.0."): tensor.to(embedding.dtype).double()
            for name, tensor in stored.items()
            if name != "d2t"
        }
        self.ids = torch.arange(len(embedding))
        if "d2t" in stored:
            self.ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
        self.embedding, self.states = embedding.double(), states
        self.head = self.weights.get("lm_head.weight", head.double()[self.ids])

    def dflash(self, text: Sequence[int], num_masks: int) -> Tensor:
        """Return the logits [num_masks, Vd] of the tokens that follow a text."""
        context = self._norm(self._linear(self.states(text)[:-1], "fc"), "hidden_norm")
        x = self.embedding[[text[-1], *[self.config["dflash_config"]["mask_token_id"]] * num_masks]]
        for i in range(self.config["num_hidden_layers"]):
            inputs = self._norm(x, f"layers.{i}.input_layernorm")
            x = self._layer(f"layers.{i}", x, inputs, torch.cat((context, inputs)))
        return self._norm(x[1:], "norm") @ self.head.T

    def eagle3(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the logits [Vd] of the token that follows a text and a path of drafts."""
        inputs, tokens = self._linear(self.states(text)[:-1], "fc"), [*text[1:], *path]
        for count in range(len(text) - 1, len(tokens) + 1):
            embedded = self._norm(self.embedding[tokens[:count]], "layers.0.input_layernorm")
            normed = self._norm(inputs, "layers.0.hidden_norm")
            x = normed if self.config.get("norm_before_residual") else inputs
            both = torch.cat((embedded, normed), 1)
            out = self._layer("layers.0", x, both, both, is_causal=True)[-1:]
            inputs = torch.cat((inputs, out))
        return self._norm(out, "norm")[0] @ self.head.T

    def _layer(self, name: str, x: Tensor, queries: Tensor, keys: Tensor, is_causal: bool = False) -> Tensor:
        """Run a layer on x [n, H], with the normalized inputs of its queries [n, W] and keys [m, W]. Keys are
        at positions 0 to m - 1, queries at the last n of these."""
        (n, m), attn = (len(queries), len(keys)), f"{name}.self_attn"
        q = self._rotate(self._heads(queries, f"{attn}.q"), torch.arange(m - n, m))
        k, v = self._rotate(self._heads(keys, f"{attn}.k"), torch.arange(m)), self._heads(keys, f"{attn}.v")
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[2] ** 0.5
        if is_causal:
            scores += torch.full((n, m), -torch.inf).triu(1 + m - n)
        out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1)
        x = x + self._linear(out, f"{attn}.o_proj")
        h = self._norm(x, f"{name}.post_attention_layernorm")
        gated = F.silu(self._linear(h, f"{name}.mlp.gate_proj")) * self._linear(h, f"{name}.mlp.up_proj")
        return x + self._linear(gated, f"{name}.mlp.down_proj")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        heads = self._linear(x, f"{name}_proj").unflatten(1, (-1, self.config["head_dim"]))
        return self._norm(heads, f"{name}_norm") if f"{name}_norm.weight" in self.weights else heads

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads x [n, h, D] by RoPE."""
        D = x.shape[2]
        angle = torch.outer(
            positions.double(), self.config["rope_theta"] ** -(torch.arange(0, D, 2).double() / D)
        )
        (one, other), cos, sin = x.chunk(2, -1), angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
