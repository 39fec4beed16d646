"""Find the folder of a model by its name.

A name is looked up, in this order, as a path, in `./weights`, in $NANOSPEC_WEIGHTS, in `weights/` of a source
checkout, in the user's cache ($XDG_CACHE_HOME/nanospec or ~/.cache/nanospec), and on the Hugging Face Hub.
The path of a GGUF file gives a folder in the cache with a link to it.
"""

import os
import re
import sys
from pathlib import Path

from ..text.validation import reason, shown

HUB_TIMEOUT = 10  # seconds without an answer after which the hub counts as unreachable
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES, NOT_FILES = ["*.safetensors", "*.json", "*.jinja"], ["*/*", "consolidated*"]  # skips other formats
DRAFTERS = "drafters"  # subfolder of a weights folder
MAX_NAME = 1024  # characters; operating systems limit paths to a few times that
PACKAGE = Path(__file__).resolve().parent.parent


def program() -> str:
    """Return the command that started this program, for messages."""
    typed = {"nanospec": "nanospec", "run.py": "python run.py"}
    return typed.get(Path(sys.argv[0]).name, "python -m nanospec")


def cache_folder() -> Path:
    """Return the user's cache folder, for models outside a checkout."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "nanospec"


def weights_folders() -> list[Path]:
    """Return the folders in which models are looked up by name, in order."""
    named, checkout = os.environ.get("NANOSPEC_WEIGHTS"), PACKAGE.parent
    folders = [Path(named).expanduser()] if named else []
    if (checkout / "run.py").is_file():
        folders.append(checkout / "weights")
    return [Path("weights").absolute(), *folders, cache_folder()]


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the folder of a model, given the path of a folder or GGUF file, a name in `weights_folders()`,
    or a hub id, which is downloaded to the cache of the hub. Raises FileNotFoundError, or ValueError for
    other argument types and for GGUF files that are corrupt or not supported."""
    if not isinstance(name_or_path, str | Path) or len(str(name_or_path)) > MAX_NAME:
        raise ValueError(f"model={shown(name_or_path)} must be a path, or the name or hub id of a model.")
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    for folder in (path, *(parent / name for parent in weights_folders())):
        if name and os.path.isfile(folder / "config.json"):  # False, unlike Path's, if a name is too long
            return folder
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        from .formats.gguf import model_folder  # imports torch, which takes seconds

        return model_folder(path)
    why = (
        f"it is neither a folder with config.json nor a GGUF file (*.gguf), a name in weights/ or "
        f"{cache_folder()}, or a hub id 'org/name' of a model in safetensors"
    )
    if HUB_ID.fullmatch(name) and not os.path.exists(path):
        try:
            return download(name)
        except Exception as error:  # of any of several HTTP libraries
            why = f"no folder has this name, and it could not be downloaded from the hub ({reason(error)})"
    raise FileNotFoundError(
        f"unknown model {shown(name)}: {why}. Download a model with: {program()} fetch NAME, such as "
        "smollm2-135m-instruct."
    )


def default_drafter(model_folder: Path) -> Path:
    """Return the folder of a model's drafter: `drafters/NAME` in a weights folder, or in the package. Raises
    ValueError if there is none."""
    for folder in (*(folder / DRAFTERS for folder in weights_folders()), PACKAGE / "weights"):
        path = folder / model_folder.name
        if (path / "config.json").is_file():
            return path
    raise ValueError(
        f"no drafter found for {model_folder.name!r}; set draft_model to its folder or hub id "
        "(examples/train_eagle3.py trains an EAGLE-3 drafter)."
    )


def download(hub_id: str, folder: Path | None = None) -> Path:
    """Download a model from the Hugging Face Hub to a folder, by default in the hub's cache, and return it.
    Raises FileNotFoundError for a model without config.json, and the errors of several HTTP libraries."""
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT))  # read by the next import
    from huggingface_hub import snapshot_download

    path = snapshot_download(
        hub_id, local_dir=folder, etag_timeout=HUB_TIMEOUT, allow_patterns=FILES, ignore_patterns=NOT_FILES
    )
    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError("it has no config.json")
    return Path(path)
