"""Safetensors files. They are memory-mapped and copied tensor by tensor, so loading takes little more memory
than the weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ...kernels.layer.quantized import Quantized
from ...text.files import errors_of, read_json
from ...text.validation import shown
from . import Shapes

FLOATS = ("F32", "BF16", "F16")
MAX_NAMED = 8  # tensors listed per kind of mismatch


class SafetensorsCheckpoint:
    """A checkpoint whose weights are not quantized."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, dict[str, Any]()  # the open file of each tensor
        for path in weight_files(folder):
            file = open_safetensors(path)
            if duplicates := self._files.keys() & file.keys():
                raise ValueError(f"{path} has tensors that another shard has too: {listed(duplicates)}.")
            self._files.update(dict.fromkeys(file.keys(), file))

    def check(self, shapes: Shapes, is_ignored: Callable[[str], bool]) -> None:
        used = {n: file.get_slice(n) for n, file in self._files.items() if not is_ignored(n)}
        check_fit(used, shapes, f"The weights in {self.folder} do not fit its config.json")

    def get(self, name: str) -> Tensor | Quantized:
        return self._files[name].get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: `model.safetensors`, else the shards listed in
    `model.safetensors.index.json`, else the only file. Raises FileNotFoundError or ValueError."""
    names = {file.name for file in folder.glob("*.safetensors") if file.is_file()}  # skips pipes
    index = folder / "model.safetensors.index.json"
    if "model.safetensors" in names:
        names = {"model.safetensors"}
    elif index.is_file():
        with errors_of(index):
            expected = set(map(str, read_json(index)["weight_map"].values()))
        if missing := expected - names:
            problem = f"{folder} lacks {len(missing)} of the {len(expected)} shards in {index.name}"
            raise FileNotFoundError(f"{problem}: {listed(missing)}; download the model again.")
        names = expected
    elif len(names) != 1:
        needed = f"model.safetensors, {index.name} or one *.safetensors file"
        found = listed(file.name for file in folder.iterdir()) or "no files"
        raise FileNotFoundError(f"{folder} must have {needed}, but has {found}; download the model again.")
    return [folder / name for name in sorted(names)]


def open_safetensors(file: Path) -> Any:
    """Open a file to read individual tensors. Raises ValueError if the file is corrupt."""
    with errors_of(file):
        return safe_open(file, framework="pt", device="cpu")


def check_fit(
    stored: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
    dtypes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Compare `stored`, slices of safetensors files by name, with the expected `shapes` and `dtypes`
    (default: `FLOATS`). Raises ValueError with `what` and a list of all mismatches."""
    problems = {
        "missing": list(shapes.keys() - stored.keys()),
        "unexpected": list(stored.keys() - shapes.keys()),
        "of the wrong shape": [],
    }
    for name in shapes.keys() & stored.keys():
        (shape, dtype), expected = (stored[name].get_shape(), stored[name].get_dtype()), list(shapes[name])
        if shape != expected:
            problems["of the wrong shape"].append(f"{name} {shape} instead of {expected}")
        if dtype not in (allowed := (dtypes or {}).get(name, FLOATS)):
            problems.setdefault(f"not stored as {', '.join(allowed)}", []).append(f"{name} {dtype}")
    parts = [f"{len(names)} tensor(s) {kind}: {listed(names)}" for kind, names in problems.items() if names]
    if parts:
        raise ValueError(f"{what}: {'; '.join(parts)}.")


def listed(names: Iterable[str]) -> str:
    """Return the first MAX_NAMED names, sorted, and the number of others. Unprintable names are quoted."""
    ordered = [name if len(name) <= 200 and name.isprintable() else shown(name) for name in sorted(names)]
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(ordered[:MAX_NAMED]) + more
