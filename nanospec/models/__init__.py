"""Models: here, the folder of a model is found by its name; `weights.py` loads what is in it.

A name is looked up, in this order, as a path, in `./weights`, in $NANOSPEC_WEIGHTS, in the `weights/` of a
checkout, in the user's cache ($XDG_CACHE_HOME or ~/.cache, /nanospec), and as an id of the Hugging Face hub.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ..text import reason, shown

HUB_TIMEOUT = 10  # seconds until a silent hub counts as unreachable
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES, NOT_FILES = ["*.safetensors", "*.json", "*.jinja"], ["*/*", "consolidated*"]  # no other formats
MAX_NAME = 1024  # characters; systems refuse to look for paths not much longer
PACKAGE = Path(__file__).resolve().parent.parent


def program() -> str:
    """Return the command that the user types, for messages."""
    typed = {"nanospec": "nanospec", "run.py": "python run.py"}
    return typed.get(Path(sys.argv[0]).name, "python -m nanospec")


def cache_folder() -> Path:
    """Return the folder of models outside a checkout."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "nanospec"


def weights_folders() -> list[Path]:
    """Return the folders where named models are looked up, in order."""
    named, checkout = os.environ.get("NANOSPEC_WEIGHTS"), PACKAGE.parent
    folders = [Path(named).expanduser()] if named else []
    if (checkout / "run.py").is_file():
        folders.append(checkout / "weights")
    return [Path("weights").absolute(), *folders, cache_folder()]


def available_models() -> list[str]:
    """Return the names of the models that are there, `org/name` included, sorted."""
    names: set[str] = set()
    for folder in weights_folders():
        found = (*folder.glob("*/config.json"), *folder.glob("*/*/config.json"))
        names |= {str(path.parent.relative_to(folder)) for path in found}
    return sorted(name for name in names if not name.startswith("."))


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the folder of a model, given a folder, a name below one of `weights_folders()`, or a hub id. The
    last is downloaded into the cache of huggingface_hub. Raises FileNotFoundError."""
    if not isinstance(name_or_path, str | Path) or len(str(name_or_path)) > MAX_NAME:
        raise ValueError(f"model={shown(name_or_path)} must be a folder, or the name or hub id of a model.")
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    for folder in (path, *(parent / name for parent in weights_folders())):
        if name and (folder / "config.json").is_file():
            return folder
    if path.is_file():
        convert = f"convert it: {program()} convert FILE FOLDER"
        hint = convert if path.suffix == ".gguf" else "give the folder that holds it"
        raise FileNotFoundError(f"{name} is a file, but a model is a folder; {hint}.")
    if name and path.is_dir():
        said = f"the folder {shown(name)} holds no config.json, so it is not a model"
        raise FileNotFoundError(f"{said}; a model folder has config.json, tokenizer.json and *.safetensors.")
    why = f"it is neither a folder, nor a name below weights/ or {cache_folder()}, nor an id 'org/name'"
    if HUB_ID.fullmatch(name):
        try:
            return download(name)
        except Exception as error:  # the hub library raises those of several HTTP libraries
            why = f"no folder has that name, and the Hugging Face hub does not deliver it ({reason(error)})"
    raise FileNotFoundError(
        f"there is no model {shown(name)}: {why}. Models that are there: "
        f"{', '.join(available_models()) or 'none'}. "
        f"Fetch one with: {program()} fetch NAME, such as smollm2-135m-instruct"
    )


def default_heads(model_folder: Path) -> Path:
    """Return the Medusa heads of a model: `heads/NAME.safetensors` beside the models, or of the package."""
    for folder in (*weights_folders(), PACKAGE):
        path = folder / "heads" / f"{model_folder.name}.safetensors"
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there are no Medusa heads for {model_folder.name!r}; name a file of them, or train some: "
        f"{program()} train --model {model_folder.name}"
    )


def download(hub_id: str, folder: Path | None = None) -> Path:
    """Download a model of the Hugging Face hub into a folder, or into the hub's cache; return the folder.
    Raises FileNotFoundError for a model without config.json, and errors of several HTTP libraries."""
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT))  # read by the next import
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        hub_id, local_dir=folder, etag_timeout=HUB_TIMEOUT, allow_patterns=FILES, ignore_patterns=NOT_FILES
    )
    if not (Path(found) / "config.json").is_file():
        raise FileNotFoundError("it holds no config.json")
    return Path(found)
