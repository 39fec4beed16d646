"""The wheel contains everything the installed program needs, and only the top-level package `nanospec`."""

import ast
import re
import sys
import zipfile
from pathlib import Path

import pytest

import nanospec
from bench.wheel import build_wheel

ROOT = Path(__file__).resolve().parent.parent
FOR_WORK_ON_IT = {"test", "lint", "plot"}  # extras the installed program does not import


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files in a wheel built without a network; those that describe it are in "about/"."""
    path = build_wheel(tmp_path_factory.mktemp("wheel"), "--no-build-isolation", "--no-index")
    with zipfile.ZipFile(path) as files:
        return {re.sub(r"^[^/]*dist-info/", "about/", name): files.read(name) for name in files.namelist()}


@pytest.mark.slow
def test_wheel_contents(wheel: dict[str, bytes]) -> None:
    """The wheel includes C++ sources, pages and the drafter, but no tests, models or compiled code."""
    folders = {"nanospec": "nanospec", "weights/drafters": "nanospec/weights"}
    sources = {}
    for folder, there in folders.items():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                sources[f"{there}/{file.relative_to(ROOT / folder).as_posix()}"] = file.read_bytes()
    assert {"nanospec/kernels/native/arithmetic.h", "nanospec/apps/serve/page/index.html"} <= sources.keys()
    named = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert wheel.keys() == {*sources, *(f"about/{name}" for name in named)}
    assert [name for name, text in sources.items() if text != wheel[name]] == []
    assert b"nanospec = nanospec.__main__:command" in wheel["about/entry_points.txt"]
    [version] = re.findall(rb'^__version__ = "(.*)"$', wheel["nanospec/__init__.py"], re.MULTILINE)
    assert b"\nVersion: %s\n" % version in wheel["about/METADATA"]
    assert b"\n## [%s] - 2" % version in (ROOT / "CHANGELOG.md").read_bytes()


def test_unknown_names_are_rejected() -> None:
    assert set(nanospec.__all__) <= set(dir(nanospec))
    with pytest.raises(AttributeError, match="^module 'nanospec' has no attribute 'LMM'$"):
        _ = nanospec.LMM


@pytest.mark.slow
def test_imports_match_declared_dependencies(wheel: dict[str, bytes]) -> None:
    """Transitive dependencies may disappear. The sources are valid for the oldest Python."""
    imported = {}
    for name, text in wheel.items():
        tree = ast.parse(text if name.endswith(".py") else "", name, feature_version=(3, 10))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported.update(dict.fromkeys((alias.name.split(".")[0] for alias in node.names), name))
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported[str(node.module).split(".")[0]] = name
    foreign = {name: where for name, where in imported.items() if name not in sys.stdlib_module_names}
    always, extras = set(), set()
    for line in re.findall(r"^Requires-Dist: (.*)$", wheel["about/METADATA"].decode(), re.MULTILINE):
        name = re.split(r"[^\w.-]", line)[0].replace("-", "_")
        extra = re.search(r"extra == [\"'](\w+)", line)
        if extra is None:
            always.add(name)
        elif extra[1] not in FOR_WORK_ON_IT:
            extras.add(name)
    assert {name: where for name, where in foreign.items() if name not in always | extras} == {}
    assert always <= foreign.keys() | {"numpy"}  # which torch needs for `Tensor.numpy`
