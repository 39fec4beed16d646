"""The operations of a CPU step in C++, compiled once on the user's machine and kept in the user's cache.

    library()            the loaded library, or None where it cannot be had; a warning says why, once
    call(name, *values)  call one of its functions

Functions take one structure of words of 8 bytes, each the address of a tensor or a number (`structs.h`,
`step.h`). All tensors must be contiguous, as tables, batches and proposals are, but for `Rows` of structs.h.

Compiling needs g++ 11 or newer (`$CXX`, else g++ or c++) and takes some ten seconds. It is for this
processor, unless CXX names another, as CXX="g++ -march=x86-64-v3" does (any with AVX2). The sources use
nothing of torch. The file's name has a hash of sources, options and processor, so a library outlives the
compiler that made it.

To be read in this order: this file, `step.h`, the types at the beginning of `arithmetic.h` and `structs.h`
(what is passed), `models/cpu.py` (the caller); then the forward pass, `decoder.cpp`, and below it
`attention.h`, `cache.h`, `product.h`, `arithmetic.h` (or `amx.h`) and `threads.h`; beside it `sampling.cpp`,
`step.cpp` and `ngram.cpp`. `packed.py` lays weights and the KV cache out, on large pages.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from array import array
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

Word = Tensor | int | None

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")


@cache
def library(insist: bool = False) -> ctypes.CDLL | None:
    """Return the library, compiled if need be. With `insist`, raise OSError where it cannot be had."""
    try:
        return ctypes.CDLL(str(built(cache_folder())))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:  # ValueError: of CXX
        failure = "The C++ for CPUs could not be compiled"
        # The first line of the compiler's output that tells of an error.
        lines = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)[-200:]]
        reason = next((line for line in lines if "error" in line), lines[0])[:200]
        remedy = f"install g++ 11 or newer, or name it in CXX ({reason})."
        if insist:
            raise OSError(f"{failure}, which NANOSPEC_KERNELS=native asks for; {remedy}") from None
        slower = "so PyTorch runs instead, at less than half the speed"
        warnings.warn(f"{failure}, {slower}; {remedy}", stacklevel=2)
        return None


def call(name: str, *values: Word) -> array[int]:
    """Call a function of the library. Return the words, some of which it may have changed."""
    found = words(*values)
    getattr(library(insist=True), name)(ctypes.c_void_p(found.buffer_info()[0]))
    return found


def words(*values: Word) -> array[int]:
    return array("q", [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values])


def target() -> str:
    """Return the name of the instructions that the library multiplies with."""
    function = getattr(library(insist=True), "nanospec_target")  # noqa: B009 (or mypy asks for None)
    function.restype = ctypes.c_char_p
    return str(function().decode())


def built(folder: Path) -> Path:
    """Return the library's file in `folder`, compiled if there is none as long as its name says: to load one
    that is cut off would end the process (SIGBUS). OSError or CalledProcessError if that fails."""
    name = f"native-{fingerprint()}"
    for file in folder.glob(f"{name}-*.so"):
        if file.stem == f"{name}-{file.stat().st_size}":
            return file
    command = [*find_compiler(), *FLAGS, *map(str, SOURCES)]
    folder.mkdir(parents=True, exist_ok=True)
    print("Compiling the C++ for this processor, once ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        result = Path(partial) / "native.so"
        _compile([*command, "-o", str(result)], partial)
        # At once: another process may be doing the same.
        return result.replace(folder / f"{name}-{result.stat().st_size}.so")


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
    """Return a hash of what a library is made from: sources, options, and what `-march=native` depends on."""
    options = shlex.split(os.environ.get("CXX", ""))[1:]
    sources = (path.read_text() for path in (*SOURCES, *HEADERS))
    processor = {platform.processor()}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = {line for line in lines if line.startswith(("model", "flags", "Features"))}
    parts = *sources, *FLAGS, *options, *sorted(processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
