"""The C++ of this folder as a library: compiled once for this machine, kept in the user's cache.

    library()   the loaded library, or None where it cannot be had; the reason is said once, as a warning

It needs g++ 11 or newer (`$CXX`, else g++ or c++) and takes some ten seconds. It is for this processor,
unless CXX names another, as CXX="g++ -march=x86-64-v3" does (any with AVX2). The sources use nothing of
torch. The file's name has a hash of sources, options and processor, so nothing needs to be cleaned up by
hand, and a library outlives the compiler that made it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")


@cache
def library(insist: bool = False) -> ctypes.CDLL | None:
    """See the module docstring. With `insist`, raise OSError where the library cannot be had."""
    try:
        return ctypes.CDLL(str(built(cache_folder())))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:  # ValueError: of CXX
        failure = "The C++ for CPUs could not be compiled"
        remedy = f"install g++ 11 or newer, or name it in CXX ({_reason(error)})."
        if insist:
            raise OSError(f"{failure}, which NANOSPEC_KERNELS=native asks for; {remedy}") from None
        slower = "so PyTorch runs instead, at less than half the speed"
        warnings.warn(f"{failure}, {slower}; {remedy}", stacklevel=2)
        return None


def is_whole(file: Path) -> bool:
    """Return whether a library is there and not cut off: to load what is missing would end the process
    (SIGBUS). Its last part is the table of its sections, of which the header says where it is."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        header = content.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\2":
        return False
    (start,), (size, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=HH", header, 58)
    return bool(start + size * count <= file.stat().st_size)


def target() -> str:
    """Return the name of the instructions that the library multiplies with."""
    found = library()
    assert found is not None
    found.nanospec_target.restype = ctypes.c_char_p
    return str(found.nanospec_target().decode())


def _reason(error: Exception) -> str:
    """Return the first line of a compiler's output that tells of an error, at most 200 characters of it."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)[-200:]]
    return next((line for line in lines if "error" in line), lines[0])[:200]


def built(folder: Path) -> Path:
    """Return the library's file in `folder`, compiled if it is not there yet. OSError or CalledProcessError
    if that fails."""
    file = folder / f"native-{fingerprint()}.so"
    if not is_whole(file):
        command = [*find_compiler(), *FLAGS, *map(str, SOURCES)]
        folder.mkdir(parents=True, exist_ok=True)
        print("Compiling the C++ for this processor, once ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            result = Path(partial) / file.name
            _compile([*command, "-o", str(result)], partial)
            os.replace(result, file)  # at once: another process may be doing the same
    return file


def _compile(command: list[str], folder: str) -> None:
    """Run the compiler, with its temporary files in the folder. It starts processes of its own, and all of
    them end when this one is interrupted."""
    pipe, env = subprocess.PIPE, {**os.environ, "TMPDIR": folder}
    with subprocess.Popen(
        command, stderr=pipe, text=True, errors="replace", env=env, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler, for this processor if it names no other."""
    name, *options = shlex.split(os.environ.get("CXX", "")) or [""]
    names = [name] if name else ["g++", "c++"]
    if not any(option.startswith("-march=") for option in options):
        options.append("-march=native")
    for name in names:
        if found := shutil.which(name):
            return [found, *options]
    raise FileNotFoundError(f"there is no {' or '.join(names)}")


def fingerprint() -> str:
    """Return a hash of what a library is made from."""
    options = shlex.split(os.environ.get("CXX", ""))[1:]
    sources = (path.read_text() for path in (*SOURCES, *HEADERS))
    parts = *sources, *FLAGS, *options, _processor()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model", "flags", "Features"))}))


def cache_folder() -> Path:
    """Return the user's own, or one of this process alone where that cannot be written to. (A common one,
    such as in /tmp, would let others put code there.)"""
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanospec"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nanospec-")
