"""Safetensors checkpoints with weights of 8 and 4 bits, and functions for their formats.

A weight is quantized if its codes or scales are stored. Lists of excluded modules in the config are not read,
since programs disagree on their syntax. Scales of activations and of the KV cache are ignored: the C++
computes scales of activations from their values, and the cache is not quantized.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.layer.quantized import GROUP, Quantized
from ...text.files import errors_of
from ...text.validation import shown
from . import Shapes
from .safetensors import FLOATS, SafetensorsCheckpoint, check_fit

UNUSED = (".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".k_scale", ".v_scale",
          ".kv_scale", ".weight_shape")  # fmt: skip

Config = Mapping[str, Any]
Shape = tuple[int, ...]
Part = tuple[Shape, str]  # the shape of a stored tensor and its dtype; "float" stands for `FLOATS`
Block = tuple[int, int]  # rows and columns with the same scale


class Module(NamedTuple):
    """A layer with a weight [N, K], and the shapes of its stored tensors by the last part of their names."""

    name: str
    shape: Shape
    stored: Mapping[str, Shape]

    def blocks(self, given: Block | None, scale: str) -> tuple[Block, Shape]:
        """Return the block and the number of blocks in both dimensions. Without a given block, the stored
        tensor `scale` has one element for each row, or one in all."""
        n, k = self.shape
        rows, columns = given or (1 if math.prod(self.stored.get(scale, ())) > 1 else n, k)
        return (rows, columns), (math.ceil(n / rows), math.ceil(k / columns))

    def fitted(self, name: str, shape: Shape) -> Shape:
        """Return the stored shape of a tensor if it equals `shape` up to dimensions of 1, else `shape`."""
        stored = self.stored.get(name, shape)
        return stored if [n for n in stored if n != 1] == [n for n in shape if n != 1] else shape


# The tensors that store a weight, by the last part of their names, and a function that converts them. It
# raises ValueError with the reason if values are invalid.
Layout = tuple[dict[str, Part], Callable[..., Tensor | Quantized]]
Format = Callable[[Module], Layout | None]  # returns None for modules that the config does not quantize


class QuantizedCheckpoint(SafetensorsCheckpoint):
    """A checkpoint with quantized weights; others are stored as usual."""

    def __init__(self, folder: Path, format: Format) -> None:
        super().__init__(folder)
        self._format, self._layouts = format, dict[str, Layout]()

    def check(self, shapes: Shapes, is_ignored: Callable[[str], bool]) -> None:
        def is_used(name: str) -> bool:
            if is_ignored(name) or name.endswith(UNUSED):
                return False
            # AutoGPTQ adds a bias of 0 to each layer without one.
            return name in shapes or not name.endswith(".bias") or self._files[name].get_tensor(name).any()

        used = {name: file.get_slice(name) for name, file in self._files.items() if is_used(name)}
        stored: defaultdict[str, dict[str, Shape]] = defaultdict(dict)
        for name, tensor in used.items():
            module, _, last = name.rpartition(".")
            stored[module][last] = tuple(tensor.get_shape())
        expected: dict[str, Part] = {}
        for name, shape in shapes.items():
            module, _, last = name.rpartition(".")
            parts: dict[str, Part] = {last: (shape, "float")}
            layout = self._format(Module(module, shape, stored[module])) if len(shape) == 2 else None
            if layout is not None and stored[module].keys() & layout[0].keys() - {"weight"}:
                if shape[1] % GROUP:
                    problem = f"{name} in {self.folder} has {shape[1]} columns, not a multiple of {GROUP}"
                    raise ValueError(f"{problem}, which is not supported for quantized weights.")
                self._layouts[name], parts = layout, layout[0]
            expected |= {f"{module}.{part}": fit for part, fit in parts.items()}
        sizes = {name: size for name, (size, _) in expected.items()}
        dtypes = {name: FLOATS if dtype == "float" else (dtype,) for name, (_, dtype) in expected.items()}
        check_fit(used, sizes, f"The weights in {self.folder} do not fit its config.json", dtypes=dtypes)

    def get(self, name: str) -> Tensor | Quantized:
        if name not in self._layouts:
            return super().get(name)
        (parts, decode), module, read = self._layouts[name], name.rpartition(".")[0], super().get
        with errors_of(f"{name} in {self.folder}"):
            return decode(**{last: read(f"{module}.{last}") for last in parts})


def option(config: Config, key: str, *supported: Any) -> Any:
    """Return the value of a key, or `supported[0]` if it is missing or null. Raises ValueError for values
    that are not supported."""
    value = supported[0] if config.get(key) is None else config[key]
    if value not in supported:
        raise ValueError(f"{key}={shown(value)} is not supported; use {' or '.join(map(repr, supported))}.")
    return supported[supported.index(value)]  # converts 4.0 to 4


def parse_block(config: Config, key: str) -> Block | None:
    """Return the block of a number of columns or of [rows, columns], None if it is -1 or missing."""
    size = config.get(key)
    if size is None or size == -1:
        return None
    rows, columns = size if isinstance(size, list) and len(size) == 2 else (1, size)
    if not (type(rows) is type(columns) is int and rows > 0 and columns > 0 and columns % GROUP == 0):
        raise ValueError(f"{key}={shown(size)} is not supported; its columns must be a multiple of {GROUP}.")
    return rows, columns


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Split int32 [M, n] into uint8 codes [M, n * 32 / bits], lowest bits first."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def from_blocks(
    codes: Tensor, scale: Tensor, block: Block, zero: Tensor | None = None, bits: int = 8
) -> Quantized:
    """Return scale * (codes - zero) of codes [N, K], with a scale and zero point for each block; without
    `zero`, integers have the offset 2^(bits - 1). Raises ValueError if a code is NaN or a scale invalid."""
    (n, k), (rows, columns) = codes.shape, block
    group = math.gcd(columns, k)  # groups are smaller than blocks that do not divide the columns

    def by_group(values: Tensor) -> Tensor:  # [N, groups]
        values = values.reshape(math.ceil(n / rows), -1).repeat_interleave(rows, 0)[:n]
        return values.repeat_interleave(columns // group, 1)[:, : k // group]

    scale = by_group(scale.float())
    if not ((scale > 0) & (scale * 512).isfinite()).all():  # 512: more than any code, up to 448 in float8
        raise ValueError("a scale that is NaN, too large, negative or zero")
    if codes.is_floating_point() and (codes.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("a value that is NaN")
    if zero is None or (zero == 1 << (bits - 1)).all():
        return Quantized(codes, scale, None, bits)
    return Quantized(codes, scale, -scale * by_group(zero), bits)
