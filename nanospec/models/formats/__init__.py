"""Checkpoint formats, one file each. `weights.py` opens a checkpoint and reads its tensors one by one.

A format that stores weights in 8 or 4 bits returns them as `Quantized`. The checkpoint is checked as a whole
before the first tensor is read; one error lists all mismatches.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...kernels.layer.quantized import Quantized
from ...text.files import errors_of
from ...text.validation import shown

Shapes = Mapping[str, tuple[int, ...]]  # by the names of a family's checkpoints


class Checkpoint(Protocol):
    """The tensors of a model folder."""

    def check(self, shapes: Shapes, is_ignored: Callable[[str], bool]) -> None:
        """Raise ValueError unless it has the tensors of `shapes` and, except ignored ones, no others."""

    def get(self, name: str) -> Tensor | Quantized:
        """Return a tensor on the CPU. Raises ValueError if its values are invalid, such as NaN scales."""


# Classes by `quant_method` in config.json, in the file of the same name, with "_" for "-"; imported on use.
QUANTIZED = {"awq": "Awq", "compressed-tensors": "CompressedTensors", "fp8": "Fp8", "gptq": "Gptq"}


def open_checkpoint(folder: Path, raw: Mapping[str, Any]) -> Checkpoint:
    """Open the checkpoint in `folder`, whose config.json is `raw`. Raises FileNotFoundError or ValueError."""
    from .quantized_safetensors import QuantizedCheckpoint
    from .safetensors import SafetensorsCheckpoint

    gguf = folder / "model.gguf"  # a link; GGUFCheckpoint reports a missing target
    if os.path.lexists(gguf) and not any(folder.glob("*.safetensors")):
        from .gguf import GGUFCheckpoint

        return GGUFCheckpoint(gguf)
    config: Any = raw.get("quantization_config") or raw.get("compression_config")
    if config is None and isinstance(text := raw.get("text_config"), dict):
        config = text.get("quantization_config")
    if not config:
        return SafetensorsCheckpoint(folder)
    with errors_of(folder / "config.json"):
        if (name := config.get("quant_method")) not in QUANTIZED:
            raise ValueError(f"quant_method={shown(name)} is not supported; use {' or '.join(QUANTIZED)}.")
        format = getattr(import_module(f".{name.replace('-', '_')}", __name__), QUANTIZED[name])(config)
    return QuantizedCheckpoint(folder, format.layout)
