"""Checkpoint formats, one file each. `weights.py` opens a checkpoint and reads its tensors one by one.

A format that stores weights in 8 or 4 bits returns them as `Quantized`. The checkpoint is checked as a whole
before the first tensor is read; one error lists all mismatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...kernels.layer.quantized import Quantized

Shapes = Mapping[str, tuple[int, ...]]  # by the names of a family's checkpoints


class Checkpoint(Protocol):
    """The tensors of a model folder."""

    def check(self, shapes: Shapes, is_ignored: Callable[[str], bool]) -> None:
        """Raise ValueError unless it has the tensors of `shapes` and, except ignored ones, no others."""

    def get(self, name: str) -> Tensor | Quantized:
        """Return a tensor on the CPU. Raises ValueError if its values are invalid, such as NaN scales."""


def open_checkpoint(folder: Path, raw: Mapping[str, Any]) -> Checkpoint:
    """Open the checkpoint in `folder`, whose config.json is `raw`. Raises FileNotFoundError or ValueError."""
    from .safetensors import SafetensorsCheckpoint

    gguf = folder / "model.gguf"
    if os.path.lexists(gguf) and not any(folder.glob("*.safetensors")):
        from .gguf import GGUFCheckpoint

        return GGUFCheckpoint(gguf)
    return SafetensorsCheckpoint(folder)
