"""From what the user calls a model to the folder that holds it."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_TIMEOUT = 10  # seconds until a silent hub counts as unreachable
FETCH = "python weights/fetch.py NAME"


def weights_folders() -> list[Path]:
    """Where named models are looked for: $NANOSPEC_WEIGHTS, then `weights/` of the repository."""
    named = os.environ.get("NANOSPEC_WEIGHTS")
    folders = [Path(named).expanduser()] if named else []
    return [*folders, Path(__file__).resolve().parent.parent.parent / "weights"]


def available_models() -> list[str]:
    """Names of the models that are there, `org/name` included, sorted."""
    names: set[str] = set()
    for folder in weights_folders():
        for pattern in ("*/config.json", "*/*/config.json"):
            found = (path.parent.relative_to(folder) for path in folder.glob(pattern))
            names.update(str(name) for name in found if not str(name).startswith("."))
    return sorted(names)


def resolve_model(name_or_path: str | Path) -> Path:
    """The folder of a model, given a folder, a name below `weights/`, or a hub id `org/name`.

    A hub id is downloaded through huggingface_hub into its cache, or taken from there.
    Raises FileNotFoundError with a sentence that says what is there and how to get the rest.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if path.is_file():
        hint = (
            "convert it: python weights/from_gguf.py FILE FOLDER"
            if path.suffix == ".gguf"
            else "give the folder that holds it"
        )
        raise FileNotFoundError(f"{name} is a file, but a model is a folder; {hint}.")
    for folder in (path, *(parent / name for parent in weights_folders())):
        if name and (folder / "config.json").is_file():
            return folder
    if name and path.is_dir():
        raise FileNotFoundError(
            f"the folder {name!r} holds no config.json, so it is not a model; a model folder has "
            "config.json, tokenizer.json and *.safetensors."
        )
    there = ", ".join(available_models()) or "none"
    known = f"Models that are there: {there}. Fetch one with: {FETCH}"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is None:
        raise FileNotFoundError(
            f"there is no model {name!r}: it is neither a folder, nor a name below weights/, nor a "
            f"Hugging Face id 'org/name'. {known}"
        )
    try:
        return download(name)
    except Exception as error:  # the hub library raises those of several HTTP libraries
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f"there is no folder {name!r}, and the Hugging Face hub does not deliver it "
            f"({reason}). {known}"
        ) from error


def default_heads(model_folder: Path) -> Path:
    """The parallel heads that come with a model: `weights/heads/NAME.safetensors`."""
    for folder in weights_folders():
        path = folder / "heads" / f"{model_folder.name}.safetensors"
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there are no parallel heads for {model_folder.name!r}; name a file of them, or train some: "
        f"python weights/train_heads.py --model {model_folder.name}"
    )


def download(hub_id: str) -> Path:
    """Download a model of the Hugging Face hub into the cache; returns the folder there."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        hub_id,
        etag_timeout=HUB_TIMEOUT,
        allow_patterns=["*.safetensors", "*.json", "*.jinja"],
        ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
    )
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError("it holds no config.json")
    return Path(folder)
