"""Checkpoints with quantized weights for tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.models.weights import load_model
from tests.tiny import checkpoint, first_logits
from tests.util import assert_close

FILE = "model.safetensors"
Tensors = dict[str, Tensor]
Store = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def save_quantized(folder: Path, variant: str, config: dict[str, Any], store: Store, **changes: Any) -> Path:
    """Save the random checkpoint `variant` of `tests.tiny` with weights of linear layers as returned by
    `store`, given the module and the weight: tensors by the last part of their names, and the dequantized
    weight, which is saved in `folder / "plain"`."""
    plain = checkpoint(folder / "plain", variant, **changes)
    tensors, stored = load_file(plain / FILE), Tensors()
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        parts = {last: tensor}
        if name.endswith("_proj.weight"):
            parts, tensors[name] = store(module, tensor)
        stored |= {f"{module}.{last}": part.contiguous() for last, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / FILE)
    save_file(stored, folder / FILE)
    raw = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return folder


def assert_loads(folder: Path, variant: str, config: dict[str, Any], store: Store, **changes: Any) -> None:
    """Compare logits with those of the dequantized weights. Values agree up to rounding in float32."""
    folders = save_quantized(folder, variant, config, store, **changes), folder / "plain"
    models = (load_model(path, torch.float32, "cpu") for path in folders)
    actual, expected = map(first_logits, models)
    assert_close(actual, expected, 1e-5)


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 with 32 / bits adjacent codes of a dimension each, from the lowest bits in an `order`."""
    values = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    words = sum(values[..., order[place]] << (bits * place) for place in range(32 // bits))
    return torch.as_tensor(words).to(torch.int32).movedim(-1, dim)
