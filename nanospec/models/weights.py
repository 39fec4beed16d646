"""Load a `Model` from a folder of safetensors.

    model = load_model(path, "auto", device)

The files are memory-mapped and copied tensor by tensor, so loading takes little more memory than the weights.
Names, shapes and dtypes of all tensors are checked before the first copy; one error names every mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
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
MAX_NAMED = 8  # tensors named per kind of mismatch


class Split(Protocol):
    """The part of a model that one of several devices has; `config` has its sizes."""

    config: ModelConfig

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a tensor of the whole model."""

    def joined(self, model: Model) -> Model:
        """Return the model of the part, connected with the other devices."""


def resolve_dtype(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Return the dtype to compute in. "auto" is the checkpoint's own on a GPU; on a CPU it is bfloat16 if
    `fast_in_bfloat16`, else float32. Raises ValueError for float16 on a CPU."""
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        name = config.dtype if not on_cpu else "bfloat16" if fast_in_bfloat16() else "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype={shown(name)} must be 'auto' or one of {', '.join(map(repr, DTYPES))}.")
    if on_cpu and name == "float16":
        raise ValueError("dtype='float16' is not supported on a CPU; use 'auto', 'bfloat16' or 'float32'.")
    return DTYPES[name]


def fast_in_bfloat16() -> bool:
    """Return whether this CPU decodes faster in bfloat16 than in float32. Our C++ does with AVX2 (3.6 times
    with one request), PyTorch with avx512_bf16 or AMX. Other architectures were not measured."""
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
    """Load the checkpoint in the folder `path`, for texts of up to `max_len` tokens if that is given, and
    only this device's part of it if the model is `split`. `dtype` may be a name, as in `resolve_dtype`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is corrupt, the config is not supported, or tensors do not fit it.
    """
    folder = Path(path)
    family, config = read_config(folder)
    dtype = dtype if isinstance(dtype, torch.dtype) else resolve_dtype(dtype, config, device)
    if max_len is not None and max_len < config.max_position_embeddings:
        config = replace(config, max_position_embeddings=max_len)
    with ExitStack() as stack:
        places = family.places(config)
        source = {n: file for n, file in _opened(folder, stack).items() if not family.is_ignored(n, config)}
        used = {name: file.get_slice(name) for name, file in source.items()}
        check_fit(used, family.stored_shapes(config), f"The weights in {folder} do not fit its config.json")
        part = None if split is None else split(config)

        def get(name: str) -> Tensor:
            whole, rows = places[name]
            stored = source[whole].get_tensor(whole)[rows]
            stored = stored if part is None else part.take(name, stored)
            # Always a copy: what aliases the file would change with it.
            return family.convert(name, stored.to(device=device, dtype=dtype, copy=True), config)

        if part is None:
            return model_class(config, dtype, device)(config, dtype, device, get)
        return part.joined(Model(part.config, dtype, device, get))


def _opened(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return for the name of each tensor the file that has it, open as long as the stack is."""
    found: dict[str, Any] = {}
    for file in weight_files(folder):
        handle = stack.enter_context(open_safetensors(file))
        if twice := found.keys() & handle.keys():
            raise ValueError(f"{file} holds tensors of another shard too: {listed(twice)}.")
        found.update(dict.fromkeys(handle.keys(), handle))
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: `model.safetensors`, the shards that
    `model.safetensors.index.json` names, or the only file there is."""
    names = {file.name for file in folder.glob("*.safetensors") if file.is_file()}  # not a pipe
    index = folder / "model.safetensors.index.json"
    if "model.safetensors" in names:
        names = {"model.safetensors"}
    elif index.is_file():
        shards = read_json(index).get("weight_map")
        wanted = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        if not wanted:
            raise ValueError(f"{index} must have a 'weight_map' from tensors to files beside it.")
        if missing := wanted - names:
            said = f"{folder} lacks {len(missing)} of the {len(wanted)} shards that {index.name} names"
            raise FileNotFoundError(f"{said}: {listed(missing)}; download the model again.")
        names = wanted
    elif len(names) > 1:
        said = f"{folder} has {len(names)} safetensors files but neither model.safetensors nor {index.name}"
        raise ValueError(f"{said}, which says how they belong together.")
    elif not names:
        others = [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")]
        hint = f" (found {listed(others)}; convert to safetensors first)" if others else ""
        raise FileNotFoundError(f"{folder} has no *.safetensors file{hint}; fetch the model again.")
    return [folder / name for name in sorted(names)]


def open_safetensors(file: Path) -> Any:
    """Open a file for reading tensor by tensor. Raises ValueError if it is corrupt."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        said = f"{file} is not a valid safetensors file ({reason(error)})"
        raise ValueError(f"{said}; it may be truncated, download it again.") from None


def check_fit(
    stored: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: str, optional: Sequence[str] = ()
) -> None:
    """Raise ValueError, beginning with `what`, that names every tensor that is missing, extra or unfit: of
    `stored`, slices of a safetensors file by name; those of `optional` may be missing."""
    both = shapes.keys() & stored.keys()
    found = {name: (list(stored[name].get_shape()), list(shapes[name])) for name in both}
    dtypes = {name: stored[name].get_dtype() for name in both}
    problems = {
        "missing": shapes.keys() - stored.keys() - set(optional),
        "not expected": stored.keys() - shapes.keys(),
        "of the wrong shape": [f"{n} {it} instead of {our}" for n, (it, our) in found.items() if it != our],
        f"not stored as {', '.join(STORED)}": [f"{n} {it}" for n, it in dtypes.items() if it not in STORED],
    }
    said = [f"{len(names)} tensor(s) {kind}: {listed(names)}" for kind, names in problems.items() if names]
    if said:
        raise ValueError(f"{what}: {'; '.join(said)}.")


def listed(names: Iterable[str]) -> str:
    """Return the first few names, sorted, and how many more there are. Unprintable names are quoted."""
    ordered = [name if len(name) <= 200 and name.isprintable() else shown(name) for name in sorted(names)]
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(ordered[:MAX_NAMED]) + more
