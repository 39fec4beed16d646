"""Load a `Model` from a folder with a config.json and a checkpoint in one of the formats in `formats/`."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.launch import use_native
from ..kernels.layer.linear import multiplies_quantized
from ..kernels.layer.quantized import Quantized, quantize
from ..text.files import errors_of, read_json
from .config import DTYPES, ModelConfig
from .cpu import model_class
from .decoder import GetWeight, Model
from .families import read_config
from .formats import open_checkpoint

QUANTIZATIONS = {"int8": 8, "int4": 4}  # bits; the names are checked by `EngineConfig`
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # of 8 bits even with int4: rows are tokens


class Split(Protocol):
    """This device's part of a model that is split across devices; `config` has the sizes of that part."""

    config: ModelConfig

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return this device's part of a tensor of the whole model."""

    def joined(self, model: Model) -> Model:
        """Return the model of this part, connected to the other devices."""


def resolve_dtype(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Return a dtype by name, see `EngineConfig`. Raises ValueError for float16 on a CPU."""
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        name = config.dtype if not on_cpu else "bfloat16" if fast_in_bfloat16() else "float32"
    if on_cpu and name == "float16":
        raise ValueError("dtype='float16' is not supported on a CPU; use 'auto', 'bfloat16' or 'float32'.")
    return DTYPES[name]


def fast_in_bfloat16() -> bool:
    """Return whether this CPU decodes faster in bfloat16 than in float32: the C++ kernels with AVX2 (3.6x for
    one request), PyTorch with avx512_bf16 or AMX. Other architectures have not been measured."""
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if wide and use_native(torch.empty(0, dtype=torch.bfloat16)):
        return True
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):  # private: may go away
        with suppress(AttributeError, RuntimeError):
            if getattr(torch.cpu, probe)():
                return True
    return False


def load_model(
    path: str | Path,
    dtype: torch.dtype | str,
    device: torch.device | str,
    max_len: int | None = None,
    split: Callable[[ModelConfig], Split] | None = None,
    quantization: str | None = None,
) -> Model:
    """Load the checkpoint in the folder `path`; with `split`, only the shard that it returns. `max_len`
    limits the context length; `dtype` may be a name, see `resolve_dtype`; `quantization` is "int8" or "int4".
    Raises FileNotFoundError if a file is missing, ValueError if one is corrupt, the config is not supported,
    or tensors do not fit it."""
    folder = Path(path)
    config = read_config(folder)[1]
    if isinstance(dtype, str):
        dtype = resolve_dtype(dtype, config, device)
    longest = config.max_position_embeddings
    config = replace(config, max_position_embeddings=min(max_len or longest, longest))
    part = None if split is None else split(config)
    get = open_weights(folder, config, part, device, dtype, quantization)
    if part is None:
        model = model_class(config, dtype, device)(config, dtype, device, get)
    else:
        model = part.joined(Model(part.config, dtype, device, get))
    with suppress(OSError, AttributeError):  # glibc would keep 1.4 GB of temporary copies of a 1.5B model
        ctypes.CDLL(None).malloc_trim(0)
    return model


def open_weights(
    folder: Path,
    config: ModelConfig,
    part: Split | None,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None,
) -> GetWeight:
    """Check the checkpoint in `folder` and return a function that reads a weight; see `load_model`."""
    family = read_config(folder)[0]
    places = family.places(config)
    checkpoint = open_checkpoint(folder, read_json(folder / "config.json"))
    checkpoint.check(family.stored_shapes(config), lambda name: family.is_ignored(name, config))
    multiplies = multiplies_quantized(device, dtype)

    def get(name: str) -> Tensor | Quantized:
        whole, rows = places[name]
        stored = checkpoint.get(whole)
        if isinstance(stored, Quantized):
            if quantization is not None:
                raise ValueError(f"{folder.name} is quantized; omit quantization={quantization!r}.")
            if multiplies and part is None:
                index = torch.arange(len(stored.codes))[rows, None]
                order = family.convert(name, index, config)  # families at most reorder the rows of a matrix
                return stored.rows(rows if order is index else order[:, 0]).to(device, dtype)
            weight = stored.rows(rows).to("cpu", dtype).dequantize()  # a part's columns may begin in a group
        else:
            weight = stored[rows]
        if part is not None:
            weight = part.take(name, weight)
        # Always copy: a view of the memory-mapped file would change if the file does.
        weight = family.convert(name, weight.to(device=device, dtype=dtype, copy=True), config)
        if quantization is None or weight.dim() == 1:
            return weight
        with errors_of(f"{name} in {folder} with quantization={quantization!r}"):
            quantized = quantize(weight, 8 if name in VOCABULARY else QUANTIZATIONS[quantization])
        return quantized if multiplies else quantized.dequantize()

    return get
