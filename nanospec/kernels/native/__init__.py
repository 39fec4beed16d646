"""C++ implementations of the operations of a CPU step, compiled on first use and cached per user.

A function takes one structure of 8-byte words, each the address of a tensor or a number (`structs.h`,
`step.h`). All tensors must be contiguous, except those that are passed together with a row stride.

Compilation needs g++ 11 or newer (`$CXX`, else g++ or c++) and takes a few seconds. It targets this
processor unless CXX sets another one: CXX="g++ -march=x86-64-v3" is for any processor with AVX2. The sources
do not depend on torch. The library is cached under a hash of sources, options and processor, independent of
the compiler, which may be removed afterwards.

Reading order: this file; `step.h`, the types at the beginning of `arithmetic.h`, and `structs.h` (the
arguments); `packed.py` (layouts and memory of weights and KV cache); `models/cpu.py` (the caller);
`decoder.cpp` (the forward pass) and its headers; then `sampling.cpp`, `step.cpp`, `ngram.cpp` and
`eagle3.cpp`.
"""

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

NativeArg = Tensor | int | None

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")


@cache
def library(required: bool = False) -> ctypes.CDLL | None:
    """Return the compiled library. On failure, raise OSError if `required`, else warn and return None."""
    try:
        return ctypes.CDLL(str(compiled_library(cache_folder())))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:  # ValueError: malformed CXX
        failure = "Could not compile the C++ kernels"
        # The first line of the compiler's output that contains an error.
        lines = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)[-200:]]
        reason = next((line for line in lines if "error" in line), lines[0])[:200]
        remedy = f"install g++ 11 or newer, or set CXX ({reason})."
        if required:
            raise OSError(f"{failure}, which NANOSPEC_KERNELS=native requires; {remedy}") from None
        slower = "falling back to PyTorch, which is about three times as slow"
        warnings.warn(f"{failure}, {slower}; {remedy}", stacklevel=2)
        return None


def call(name: str, *values: NativeArg) -> "array[int]":
    """Call a function of the library. Return its arguments as words, which may contain results."""
    args = words(*values)
    getattr(library(required=True), name)(ctypes.c_void_p(args.buffer_info()[0]))
    return args


def words(*values: NativeArg) -> "array[int]":
    return array("q", [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values])


def target() -> str:
    """Return the name of the instruction set of the matrix products."""
    function = getattr(library(required=True), "nanospec_target")  # noqa: B009 (for mypy: may be None)
    function.restype = ctypes.c_char_p
    return str(function().decode())


def compiled_library(folder: Path) -> Path:
    """Return the path of the library in `folder`, compiled if needed; raise OSError or CalledProcessError if
    that fails. Its name contains the size, because loading a truncated file would kill the process."""
    name = f"native-{fingerprint()}"
    for file in folder.glob(f"{name}-*.so"):
        if file.stem == f"{name}-{file.stat().st_size}":
            return file
    command = [*find_compiler(), *FLAGS, *map(str, SOURCES)]
    folder.mkdir(parents=True, exist_ok=True)
    print("Compiling the C++ kernels (first use only) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        result = Path(partial) / "native.so"
        _compile([*command, "-o", str(result)], partial)
        # Atomically, because another process may be compiling as well.
        return result.replace(folder / f"{name}-{result.stat().st_size}.so")


def _compile(command: list[str], folder: str) -> None:
    """Run the compiler with its temporary files in `folder`; if interrupted, kill it and its children."""
    pipe, env = subprocess.PIPE, {**os.environ, "TMPDIR": folder}
    with subprocess.Popen(
        command, stderr=pipe, text=True, errors="replace", env=env, start_new_session=True
    ) as process:
        try:
            _, output = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=output)


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler, with `-march=native` unless CXX sets `-march`."""
    name, *options = shlex.split(os.environ.get("CXX", "")) or [""]
    names = [name] if name else ["g++", "c++"]
    if not any(option.startswith("-march=") for option in options):
        options.append("-march=native")
    for name in names:
        if path := shutil.which(name):
            return [path, *options]
    raise FileNotFoundError(f"{' or '.join(names)} not found")


def fingerprint() -> str:
    """Return a hash of the sources, the options, and the processor that `-march=native` depends on."""
    options = shlex.split(os.environ.get("CXX", ""))[1:]
    sources = (path.read_text() for path in (*SOURCES, *HEADERS))
    processor = {platform.processor()}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = {line for line in lines if line.startswith(("model", "flags", "Features"))}
    parts = *sources, *FLAGS, *options, *sorted(processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Return the user's cache folder, or a temporary one of this process if that is not writable. (A shared
    folder such as /tmp would let other users place code there.)"""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home directory
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanospec"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nanospec-")
