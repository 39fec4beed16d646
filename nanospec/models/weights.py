"""From a folder of safetensors to a `Model`.

    dtype = resolve_dtype("auto", ModelConfig.from_path(path), device)
    model = load_model(path, dtype, device)

The files are memory-mapped and copied tensor by tensor, so loading takes little more memory than
the weights. Names, shapes and dtypes of all tensors are checked before the first one is copied, and
every mismatch is named in one error: a model is loaded right or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..extras.tensor_parallel.group import Group
from ..extras.tensor_parallel.shard import Part, Shard
from ..kernels.dispatch import use_native
from ..text.checks import shown
from ..text.files import read_json, reason
from .config import DTYPES, ModelConfig
from .cpu import model_class
from .decoder import Model
from .families.base import family_of, stored_shapes

STORED_DTYPES = ("F32", "BF16", "F16")
MAX_NAMED = 8  # tensors named per kind of mismatch
MAX_ANGLES = 1 << 31  # numbers in a table of angles: 8 GB


def resolve_dtype(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """The dtype to compute in.

    "auto" is the checkpoint's own on a GPU; on a CPU it is bfloat16 where `fast_in_bfloat16`, else
    float32. float16 on a CPU is a ValueError.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto" and on_cpu:
        return torch.bfloat16 if fast_in_bfloat16() else torch.float32
    if name == "auto":
        return config.torch_dtype
    if name not in DTYPES:
        raise ValueError(f"dtype={shown(name)} must be 'auto' or one of {', '.join(map(repr, DTYPES))}.")
    if on_cpu and name == "float16":
        raise ValueError("dtype='float16' is not supported on a CPU; use 'auto', 'bfloat16' or 'float32'.")
    return DTYPES[name]


def fast_in_bfloat16() -> bool:
    """Whether this CPU decodes faster in bfloat16 than in float32.

    With AVX2 it does by our own C++ (with one request 3.6 times as fast, prompts as fast); by PyTorch only if
    it multiplies bfloat16 matrices natively (avx512_bf16 or AMX). Other architectures have not been measured.
    """
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
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    group: Group | None = None,
) -> Model:
    """Load the checkpoint in the folder `path`, for texts of up to `max_len` tokens if that is given; with a
    `group`, this rank's part of it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is corrupt, the config is not supported, or tensors do not fit it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the folder of a downloaded model.")
    config = _within(ModelConfig.from_path(folder), max_len, folder)
    family = family_of(read_json(folder / "config.json"))
    with ExitStack() as stack:
        places = family.places(config)
        source = {n: file for n, file in _opened(folder, stack).items() if not family.is_ignored(n, config)}
        used = {name: file.get_slice(name) for name, file in source.items()}
        check_fit(used, stored_shapes(config, places), f"The weights in {folder} do not fit its config.json")

        def get(name: str, part: Part | None = None) -> Tensor:
            whole, first, rows = places[name]
            stored = source[whole].get_tensor(whole)[first : first + rows]
            stored = stored if part is None else part.of(stored)
            # Always a copy: what aliases the file would change with it.
            ours = family.convert(name, stored.to(device=device, dtype=dtype, copy=True), config)
            return ours if part is None else part.filled(ours)

        if group is None:
            return model_class(config, dtype, device)(config, dtype, device, get)
        shard = Shard(config, group)
        return shard.joined(Model(shard.config, dtype, device, lambda name: get(name, shard.part(name))))


def _within(config: ModelConfig, max_len: int | None, folder: Path) -> ModelConfig:
    """For texts of up to so many tokens, which a table of angles must be possible for."""
    if max_len is not None and max_len < config.max_position_embeddings:
        config = replace(config, max_position_embeddings=max_len)
    longest, most = config.max_position_embeddings, MAX_ANGLES // config.head_dim
    if longest > most:
        raise ValueError(
            f"{folder}: max_position_embeddings={longest} is more than the {most} that a table of angles is "
            "made for; give max_model_len."
        )
    return config


def _opened(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """By the name of each tensor the file that has it, open as long as the stack is."""
    found: dict[str, Any] = {}
    for file in weight_files(folder):
        handle = stack.enter_context(open_safetensors(file))
        if twice := found.keys() & handle.keys():
            raise ValueError(f"{file} holds what another shard of it holds too: {listed(map(named, twice))}.")
        found.update(dict.fromkeys(handle.keys(), handle))
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in `folder`: `model.safetensors`, or the shards of
    `model.safetensors.index.json`, or the only other one."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())  # no pipe: it would wait
    if len(files) == 1:
        return files
    if files:
        raise ValueError(
            f"{folder} has {len(files)} safetensors files but neither model.safetensors nor "
            "model.safetensors.index.json, which says how they belong together."
        )
    if lost := sorted(file for file in folder.glob("*.safetensors") if not file.exists()):
        raise FileNotFoundError(f"{lost[0]} is a link to nothing; fetch the model again.")
    instead = other_formats(folder) or "; fetch the model again"
    raise FileNotFoundError(f"{folder} has no *.safetensors file{instead}.")


def other_formats(folder: Path) -> str:
    """What to add to "not found" if a folder has weights in another format; else ""."""
    found = [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")]
    return f" (found {listed(map(named, found))}; convert to safetensors first)" if found else ""


def _shards(index: Path) -> list[Path]:
    """The files that an index names."""
    mapping = read_json(index).get("weight_map")
    files = list(mapping.values()) if isinstance(mapping, dict) else []
    if not files:
        raise ValueError(f"{index} must have a 'weight_map' from tensors to files beside it.")
    if wrong := [name for name in files if not _is_beside(name)]:
        raise ValueError(
            f"{index} must have a 'weight_map' from tensors to files beside it, and {shown(wrong[0])} is not "
            "the bare name of one; download the model again."
        )
    names = sorted(set(files))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index.parent} lacks {len(missing)} of the {len(names)} shards that {index.name} "
            f"names: {listed(map(named, missing))}; download the model again."
        )
    return [index.parent / name for name in names]


def _is_beside(name: object) -> bool:
    """Whether it can be the name of a file of the same folder."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        return False
    return "\0" not in name and len(name.encode()) <= 255


def open_safetensors(file: Path) -> Any:
    """The open file, for tensor-wise reading; ValueError if it is corrupt."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{file} is not a valid safetensors file ({reason(error)}); it may be truncated, "
            "download it again."
        ) from None


def check_fit(
    stored: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: str, optional: Sequence[str] = ()
) -> None:
    """ValueError that begins with `what` and names every tensor that is missing, extra or unfit.

    Args:
        stored: what a file's `get_slice` gives, by name.
        shapes: the shapes that are wanted; those of `optional` may be missing.
    """
    misshapen, foreign = [], []
    for name in shapes.keys() & stored.keys():
        shape, dtype = tuple(stored[name].get_shape()), stored[name].get_dtype()
        if shape != shapes[name]:
            misshapen.append(f"{name} {shown(list(shape))} instead of {list(shapes[name])}")
        if dtype not in STORED_DTYPES:
            foreign.append(f"{name} {dtype}")
    problems = {
        "missing": shapes.keys() - stored.keys() - set(optional),
        "not expected": [named(name) for name in stored.keys() - shapes.keys()],
        "of the wrong shape": misshapen,
        f"stored as something else than {', '.join(STORED_DTYPES)}": foreign,
    }
    found = [f"{len(names)} tensor(s) {kind}: {listed(names)}" for kind, names in problems.items() if names]
    if found:
        raise ValueError(f"{what}: {'; '.join(found)}.")


def listed(names: Iterable[str]) -> str:
    """The first few, sorted, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(ordered[:MAX_NAMED]) + more


def named(name: str) -> str:
    """A name as messages have it: as it is, unless it is long or cannot be printed."""
    return name if len(name) <= 100 and name.isprintable() else shown(name)
