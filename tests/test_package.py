"""The wheel holds what the installed program needs, and takes no name that belongs to others."""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.install import built

ROOT = Path(__file__).resolve().parent.parent
FOR_WORK_ON_IT = {"test", "lint", "plot"}  # extras that the installed program does not import


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files in a wheel, built without a network."""
    path = built(tmp_path_factory.mktemp("wheel"), "--no-build-isolation", "--no-index")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_everything_is_there_and_nothing_else(wheel: dict[str, bytes]) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "nanospec").rglob("*.py")}
    sources |= {f"nanospec/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert "nanospec/kernels/batch.py" in sources
    assert sources <= wheel.keys()
    assert {"nanospec/py.typed", "nanospec/heads/smollm2-135m-instruct.safetensors"} <= wheel.keys()
    pages = [path for part in ("tracing", "serve") for path in (ROOT / "nanospec" / part / "page").iterdir()]
    assert {str(path.relative_to(ROOT)) for path in pages} <= wheel.keys()
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"nanospec"}
    assert all(name in sources or not name.endswith(".py") for name in wheel)


def test_the_command_is_there(wheel: dict[str, bytes]) -> None:
    [entry_points] = [text.decode() for name, text in wheel.items() if name.endswith("entry_points.txt")]
    assert "nanospec = nanospec.cli.main:main" in entry_points


def test_the_version_is_written_once(wheel: dict[str, bytes]) -> None:
    [line] = [line for line in wheel["nanospec/__init__.py"].decode().splitlines() if "__version__" in line]
    version = line.removeprefix('__version__ = "').removesuffix('"')
    [metadata] = [text.decode() for name, text in wheel.items() if name.endswith("/METADATA")]
    assert f"\nVersion: {version}\n" in metadata
    assert f"\n## [{version}] - 2" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_sources_are_valid_for_the_oldest_python(wheel: dict[str, bytes]) -> None:
    for name, text in wheel.items():
        if name.endswith(".py"):
            ast.parse(text, name, feature_version=(3, 10))


def test_what_is_imported_is_declared_and_what_is_declared_is_imported(wheel: dict[str, bytes]) -> None:
    """What others bring today they may not bring tomorrow."""
    imported = {}
    for name, text in wheel.items():
        for node in ast.walk(ast.parse(text)) if name.endswith(".py") else ():
            if isinstance(node, ast.Import):
                imported.update(dict.fromkeys((alias.name.split(".")[0] for alias in node.names), name))
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported[str(node.module).split(".")[0]] = name
    foreign = {name: where for name, where in imported.items() if name not in sys.stdlib_module_names}
    [metadata] = [text.decode() for name, text in wheel.items() if name.endswith("METADATA")]
    always, extras = set(), set()
    for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE):
        name = re.split(r"[^\w.-]", line)[0].replace("-", "_")
        extra = re.search(r"extra == [\"'](\w+)", line)
        if extra is None:
            always.add(name)
        elif extra[1] not in FOR_WORK_ON_IT:
            extras.add(name)
    assert {name: where for name, where in foreign.items() if name not in always | extras} == {}
    assert always <= foreign.keys()
