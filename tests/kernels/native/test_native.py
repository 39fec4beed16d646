"""C++ code is compiled once for the requested processors; without a compiler PyTorch is used."""

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nanospec.kernels import launch, native
from nanospec.kernels.batch import Tensors
from nanospec.kernels.launch import forced
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.trim import Estimates
from nanospec.kernels.table import Table
from nanospec.models.cpu import CompiledModel
from tests.processors import PROCESSORS
from tests.tiny import ModelRunner, tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler: install g++")

ROOT = Path(__file__).resolve().parents[3]
BF16 = torch.bfloat16


def test_structs_have_the_fields_of_the_tuples() -> None:
    source = "".join((native.SOURCES[0].parent / name).read_text() for name in ("step.h", "step.cpp"))
    batch = (*Tensors._fields[:-1], "num_rows", "num_tokens", "max_q_len", "max_blocks")
    proposal = *Proposal._fields, "num_rows", "k"
    fields = {"Table": Table._fields, "Batch": batch, "Proposal": proposal, "Estimates": Estimates._fields}
    for name, expected in fields.items():
        body = source.split(f"struct {name} {{\n")[1].split("\n}")[0].split("\n\n")[0]
        declarations = re.sub("//.*", "", body).replace("const ", "").split(";")
        # The first word of a declaration is the type.
        assert tuple(field for each in declarations for field in re.findall(r"\w+", each)[1:]) == expected


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 processor")
@pytest.mark.parametrize("name", ["AVX-512", "AMX"])
def test_kernels_compile_for_other_processors(
    built_for: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Compile decoder.cpp, the file with matrix instructions."""
    if PROCESSORS[name][1] in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("covered: the other tests compile for it")
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O0"))  # compiles twice as fast
    monkeypatch.setattr(native, "SOURCES", [path for path in native.SOURCES if path.name == "decoder.cpp"])
    assert ctypes.CDLL(str(built_for(PROCESSORS[name][0]))).nanospec_target


@pytest.mark.long
def test_kernels_access_no_memory_outside_their_buffers() -> None:
    """Run these test files with AddressSanitizer, which fails on an out-of-bounds access."""
    find = "g++", "-print-file-name=libasan.so"
    library = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("needs libasan: install g++'s sanitizers")
    env = {**os.environ, "CXX": "g++ -fsanitize=address", "ASAN_OPTIONS": "detect_leaks=0"}
    env["LD_PRELOAD"] = f"{library} {library.replace('asan', 'stdc++')}"
    files = "kernels/native/test_packed.py", "nanospec/models/test_cpu.py", "kernels/speculation"
    paths = [str(ROOT / "tests" / file) for file in (*files, "nanospec/device/test_compiled_step.py")]
    options = "-x", "-p", "no:cacheprovider", "-m", "not (slow or long)"
    command = [sys.executable, "-m", "pytest", *options, *paths]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_backend_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("nanospec.kernels.copy", launch.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("triton.knobs.compilation.listener", None)  # restored after the copy sets its own
    for name, is_native in (("native", True), ("naive", False)):
        monkeypatch.setenv("NANOSPEC_KERNELS", name)
        spec.loader.exec_module(copy)
        assert copy.use_native(torch.zeros(1, dtype=BF16)) == is_native
    monkeypatch.setenv("NANOSPEC_KERNELS", "fast")
    with pytest.raises(ValueError, match="'fast' must be one of auto, naive, native, triton"):
        spec.loader.exec_module(copy)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder for compiled libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.library.cache_clear()
    yield tmp_path / "cache" / "nanospec"
    native.library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler not found"),
        ("false", "exit status 1"),
        (r"sh -c 'echo in function; printf \344 >&2; echo error: old >&2; exit 1' cxx", "error: old"),
        ("sh -c 'echo >&2; exit 1' cxx", ".+"),
        ('g++ "', "No closing quotation"),
    ],
    ids=["none", "broken", "old", "newline", "quotation"],
)
def test_without_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str) -> None:
    """PyTorch is used with a warning, or an error is raised if C++ is required."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=rf"falling back to PyTorch.*install g\+\+ 11.*\(.*{reason}"):
        model = tiny_model(dtype=BF16, intermediate_size=96)
    assert not isinstance(model, CompiledModel)
    runner = ModelRunner(model, 1, 64)
    assert runner.step({0: torch.arange(5)})[0].isfinite().all()
    message = rf"Could not compile .*NANOSPEC_KERNELS=native.*; install g\+\+ 11.*{reason}"
    with forced("native"), pytest.raises(OSError, match=message):
        tiny_model(dtype=BF16, intermediate_size=96)
    assert not list(fresh.glob("*"))


def test_cache_folder(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may already exist. Without a home directory, a temporary one is used."""
    assert native.cache_folder() == native.cache_folder() == fresh
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert native.cache_folder() == Path(native._own_folder().name)


def test_fingerprint_covers_headers_and_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (header := tmp_path / "a.h").touch()
    monkeypatch.setattr(native, "HEADERS", [header])
    names, read = {native.fingerprint()}, Path.read_text
    header.write_text("1")
    names.add(native.fingerprint())
    monkeypatch.setattr(Path, "read_text", lambda it: "flags: a" if it.name == "cpuinfo" else read(it))
    assert len({*names, native.fingerprint()}) == 3


def test_compiled_library_is_cached_and_repaired(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = Mock(wraps=native._compile)
    monkeypatch.setattr(native, "_compile", compile_)
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O0"))
    monkeypatch.setattr(native, "SOURCES", [path for path in native.SOURCES if path.name == "ngram.cpp"])
    file = native.compiled_library(fresh)
    file.write_bytes(b"truncated")
    assert native.library() is not None
    assert list(fresh.glob("*")) == [file]
    count = compile_.call_count
    native.library.cache_clear()
    assert native.library() is not None
    assert 0 < count == compile_.call_count
    monkeypatch.setenv("CXX", "no-such-compiler")  # the compiler may have been removed
    assert native.compiled_library(fresh) == file
    monkeypatch.setenv("CXX", "no-such-compiler -march=x86-64-v3")
    with pytest.raises(FileNotFoundError, match="no-such-compiler not found"):
        native.compiled_library(fresh)
