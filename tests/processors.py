"""The C++ library compiled for other processors, and run where this one has the instructions.

Import the fixtures by name; `other_library` replaces the library that the package calls."""

import ctypes
import fcntl
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from nanospec.kernels import native

# Processors by the library's name for them: options of GCC, and the flag in /proc/cpuinfo.
PROCESSORS = {
    "AVX2": ("x86-64-v3", "avx2"),
    "AVX-512": ("x86-64-v4", "avx512vl"),
    "AVX-VNNI": ("x86-64-v3 -mavxvnni", "avx_vnni"),
    "avx512_bf16": ("x86-64-v4 -mavx512bf16 -mavx512vnni -msse4a", "avx512_bf16"),  # AMD's
    "AMX": ("x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8", "amx_bf16"),
}


@pytest.fixture(scope="session")
def built_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compile for -march, once for all processes of a test run."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    @cache
    def built(option: str) -> Path:
        folder = shared / option.replace(" ", "")
        folder.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
            patch.setenv("CXX", f"{os.environ.get('CXX', 'g++')} -march={option}")
            fcntl.flock(lock, fcntl.LOCK_EX)
            return native.compiled_library(folder)

    return built


@pytest.fixture(scope="module", params=PROCESSORS)
def compiled_for(request: pytest.FixtureRequest, built_for: Callable[[str], Path]) -> ctypes.CDLL:
    """Return the library for a type of processor."""
    option, flag = PROCESSORS[request.param]
    if platform.machine() != "x86_64" or flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"needs a processor with {flag}")
    if native.target() == request.param:
        pytest.skip("covered: the other tests run on it")
    library = ctypes.CDLL(str(built_for(option)))
    library.nanospec_target.restype = ctypes.c_char_p
    if library.nanospec_target().decode() != request.param:
        assert request.param == "AMX"
        pytest.skip("AMX is disabled on this system")
    return library


@pytest.fixture
def other_library(compiled_for: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda required=False: compiled_for)
