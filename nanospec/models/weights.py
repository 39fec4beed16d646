"""Load a `Model` from a folder of safetensors files.

Files are memory-mapped and copied tensor by tensor, so loading takes little more memory than the weights.
Names, shapes and dtypes of all tensors are checked before the first copy; one error lists all mismatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..kernels.launch import use_native
from ..text import read_json, reason, shown
from .config import DTYPES, ModelConfig
from .cpu import model_class
from .decoder import Model
from .families import read_config

STORED = ("F32", "BF16", "F16")
MAX_NAMED = 8  # tensors listed per kind of mismatch


class Split(Protocol):
    """This device's part of a model that is split across devices; `config` has the sizes of that part."""

    config: ModelConfig

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return this device's part of a tensor of the whole model."""

    def joined(self, model: Model) -> Model:
        """Return the model of this part, connected to the other devices."""


def resolve_dtype(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Return a dtype by name, see `EngineConfig`. Raises ValueError for float16 on a CPU and other names."""
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        name = config.dtype if not on_cpu else "bfloat16" if fast_in_bfloat16() else "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype={shown(name)} must be 'auto' or one of {', '.join(map(repr, DTYPES))}.")
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
) -> Model:
    """Load the checkpoint in the folder `path`; with `split`, only the shard that it returns. `max_len`
    limits the context length; `dtype` may be a name, see `resolve_dtype`. Raises FileNotFoundError if a file
    is missing, ValueError if one is corrupt, the config is not supported, or tensors do not fit it."""
    folder = Path(path)
    family, config = read_config(folder)
    dtype = dtype if isinstance(dtype, torch.dtype) else resolve_dtype(dtype, config, device)
    if max_len is not None and max_len < config.max_position_embeddings:
        config = replace(config, max_position_embeddings=max_len)
    places = family.places(config)
    source = {n: file for n, file in _opened(folder).items() if not family.is_ignored(n, config)}
    used = {name: file.get_slice(name) for name, file in source.items()}
    check_fit(used, family.stored_shapes(config), f"The weights in {folder} do not fit its config.json")
    part = None if split is None else split(config)

    def get(name: str) -> Tensor:
        whole, rows = places[name]
        stored = source[whole].get_tensor(whole)[rows]
        stored = stored if part is None else part.take(name, stored)
        # Always copy: a view of the memory-mapped file would change if the file does.
        return family.convert(name, stored.to(device=device, dtype=dtype, copy=True), config)

    if part is None:
        return model_class(config, dtype, device)(config, dtype, device, get)
    return part.joined(Model(part.config, dtype, device, get))


def _opened(folder: Path) -> dict[str, Any]:
    """Return the open file of each tensor by name."""
    handles: dict[str, Any] = {}
    for file in weight_files(folder):
        handle = open_safetensors(file)
        if duplicates := handles.keys() & handle.keys():
            raise ValueError(f"{file} has tensors that another shard has too: {listed(duplicates)}.")
        handles.update(dict.fromkeys(handle.keys(), handle))
    return handles


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: `model.safetensors`, else the shards listed in
    `model.safetensors.index.json`, else the only file. Raises FileNotFoundError or ValueError."""
    names = {file.name for file in folder.glob("*.safetensors") if file.is_file()}  # skips pipes
    index = folder / "model.safetensors.index.json"
    if "model.safetensors" in names:
        names = {"model.safetensors"}
    elif index.is_file():
        shards = read_json(index).get("weight_map")
        expected = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        if not expected:
            raise ValueError(f"{index} must have a 'weight_map' from tensors to files in the same folder.")
        if missing := expected - names:
            problem = f"{folder} lacks {len(missing)} of the {len(expected)} shards in {index.name}"
            raise FileNotFoundError(f"{problem}: {listed(missing)}; download the model again.")
        names = expected
    elif len(names) > 1:
        needed = f"model.safetensors nor {index.name}; download the model again"
        raise ValueError(f"{folder} has {len(names)} safetensors files but neither {needed}.")
    elif not names:
        others = [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")]
        hint = f" (found {listed(others)}; convert to safetensors first)" if others else ""
        raise FileNotFoundError(f"{folder} has no *.safetensors file{hint}; download the model again.")
    return [folder / name for name in sorted(names)]


def open_safetensors(file: Path) -> Any:
    """Open a file to read individual tensors. Raises ValueError if the file is corrupt."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"{file} is not a valid safetensors file ({reason(error)})"
        raise ValueError(f"{problem}; it may be truncated, download it again.") from None


def check_fit(
    stored: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: str, optional: Sequence[str] = ()
) -> None:
    """Compare `stored`, slices of safetensors files by name, with the expected `shapes`, of which those in
    `optional` may be missing. Raises ValueError with `what` and a list of all mismatches."""
    both = shapes.keys() & stored.keys()
    sizes = {name: (list(stored[name].get_shape()), list(shapes[name])) for name in both}
    dtypes = {name: stored[name].get_dtype() for name in both}
    problems = {
        "missing": shapes.keys() - stored.keys() - set(optional),
        "unexpected": stored.keys() - shapes.keys(),
        "of the wrong shape": [f"{n} {it} instead of {our}" for n, (it, our) in sizes.items() if it != our],
        f"not stored as {', '.join(STORED)}": [f"{n} {it}" for n, it in dtypes.items() if it not in STORED],
    }
    parts = [f"{len(names)} tensor(s) {kind}: {listed(names)}" for kind, names in problems.items() if names]
    if parts:
        raise ValueError(f"{what}: {'; '.join(parts)}.")


def listed(names: Iterable[str]) -> str:
    """Return the first MAX_NAMED names, sorted, and the number of others. Unprintable names are quoted."""
    ordered = [name if len(name) <= 200 and name.isprintable() else shown(name) for name in sorted(names)]
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(ordered[:MAX_NAMED]) + more
