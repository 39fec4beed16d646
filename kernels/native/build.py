"""The C++ of this folder as a library: compiled once for this machine, kept in the user's cache.

    library()   the loaded library, or None where it cannot be had; the reason is said once, as a warning

It needs g++ 11 or newer (`$CXX`, else g++ or c++) and takes some ten seconds. It is for this processor,
unless CXX names another, as CXX="g++ -march=x86-64-v3" does (any with AVX2). The sources use nothing of
torch. The file's name has hashes of all that it depends on, so nothing needs to be cleaned up by hand; where
the compiler has gone since, its last library of these sources, options and processor is taken.
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
COMPILERS = ("g++", "c++")


@cache
def library(insist: bool = False) -> ctypes.CDLL | None:
    """See the module docstring. OSError if it cannot be had by who insists."""
    try:
        file = built(cache_folder())
        try:
            return _loaded(file)
        except OSError:  # a broken file
            file.unlink()
            return _loaded(built(cache_folder()))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:  # ValueError: of CXX
        failure = "The C++ for CPUs could not be compiled"
        remedy = f"install g++ 11 or newer, or name it in CXX ({_reason(error)})."
        if insist:
            raise OSError(f"{failure}, which NANOSPEC_KERNELS=native asks for; {remedy}") from None
        slower = "so PyTorch runs instead, at less than half the speed"
        warnings.warn(f"{failure}, {slower}; {remedy}", stacklevel=2)
        return None


def _loaded(file: Path) -> ctypes.CDLL:
    """OSError for a file that is cut off, too: to load what is not there would end the process. Last in a
    library is the table of its sections, of which the header says where it is."""
    with file.open("rb") as library:
        header = library.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\2":
        raise OSError(f"{file} is no library")
    (start,), (size, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=HH", header, 58)
    if start + size * count > file.stat().st_size:
        raise OSError(f"{file} is cut off")
    return ctypes.CDLL(str(file))


def target() -> str:
    """The instructions that the library multiplies with."""
    found = library()
    assert found is not None
    found.nanospec_target.restype = ctypes.c_char_p
    return str(found.nanospec_target().decode())


def _reason(error: Exception) -> str:
    """The first line of a compiler's output that tells of an error, at most 200 characters of it."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)]
    return next((line for line in lines if "error" in line), lines[0])[:200]


def built(folder: Path) -> Path:
    """The library's file in `folder`, compiled if it is not there yet. OSError or CalledProcessError if that
    fails."""
    name = f"native-{fingerprint()}"
    try:
        compiler = find_compiler()
    except FileNotFoundError:
        kept = sorted(folder.glob(f"{name}-*.so"), key=os.path.getmtime)
        if not kept:
            raise
        return kept[-1]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, text=True).stdout
    file = folder / f"{name}-{_hash(compiler[0], version)}.so"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print("Compiling the C++ for this processor, once ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            result = Path(partial) / file.name
            command = [*compiler, *processor_flag(compiler), *FLAGS, *map(str, SOURCES), "-o", str(result)]
            _compile(command, partial)
            os.replace(result, file)  # at once: another process may be doing the same
    return file


def _compile(command: list[str], folder: str) -> None:
    """Run the compiler, whose temporary files are in the folder. It has processes of its own, which end when
    this one is told to."""
    env = {**os.environ, "TMPDIR": folder}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", env=env, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def find_compiler() -> list[str]:
    """The command of a C++ compiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    names = named[:1] or COMPILERS
    for name in names:
        if found := shutil.which(name):
            return [found, *named[1:]]
    raise FileNotFoundError(f"there is no {' or '.join(names)}")


def processor_flag(compiler: list[str]) -> list[str]:
    """What a command that names no processor lacks."""
    return [] if any(option.startswith("-march=") for option in compiler) else ["-march=native"]


def fingerprint() -> str:
    """Changes whenever the same compiler would make another library."""
    options = shlex.split(os.environ.get("CXX", ""))[1:]
    sources = (path.read_text() for path in (*SOURCES, *HEADERS))
    return _hash(*sources, " ".join((*FLAGS, *options)), _processor())


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model", "flags", "Features"))}))


def cache_folder() -> Path:
    """The user's own, or one of this process alone where that cannot be written to. (A common one, such as in
    /tmp, would let others put code there.)"""
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = _user_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nanospec-")


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanospec"
