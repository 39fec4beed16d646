"""The wheel contains everything the installed program needs, and only our top-level name."""

from __future__ import annotations

import ast
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.install import built

ROOT = Path(__file__).resolve().parent.parent
FOR_WORK_ON_IT = {"test", "lint", "plot"}  # extras the installed program does not import
LOCAL = ("--no-build-isolation", "--no-index")  # built without a network


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a wheel."""
    return built(tmp_path_factory.mktemp("wheel"), *LOCAL)


@pytest.fixture(scope="module")
def wheel(path: Path) -> dict[str, bytes]:
    """The files in the wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def about(wheel: dict[str, bytes]) -> dict[str, str]:
    """The texts in the wheel that describe it."""
    return {
        name.split(".dist-info/")[1]: text.decode() for name, text in wheel.items() if ".dist-info/" in name
    }


def test_wheel_contents(wheel: dict[str, bytes], about: dict[str, str]) -> None:
    """Includes C++ sources, pages and heads, but no tests, weights or compiled code."""
    folders = {"nanospec": "nanospec", "kernels": "nanospec/kernels", "weights/heads": "nanospec/heads"}
    sources = {}
    for folder, there in folders.items():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                sources[f"{there}/{file.relative_to(ROOT / folder).as_posix()}"] = file.read_bytes()
    assert {"nanospec/kernels/native/arithmetic.h", "nanospec/apps/serve/page/index.html"} <= sources.keys()
    ours = {name: text for name, text in wheel.items() if ".dist-info/" not in name}
    assert ours.keys() == sources.keys()
    assert [name for name, text in ours.items() if text != sources[name]] == []
    named = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert about.keys() == named
    assert "nanospec = nanospec.__main__:command" in about["entry_points.txt"]
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"nanospec"}


def test_wheel_is_reproducible(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, later, and with another umask."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        again = built(tmp_path, *LOCAL)
    finally:
        os.umask(before)
    assert again.name == path.name
    assert again.read_bytes() == path.read_bytes()


def test_version_is_defined_once(wheel: dict[str, bytes], about: dict[str, str]) -> None:
    [version] = re.findall(r'^__version__ = "(.*)"$', wheel["nanospec/__init__.py"].decode(), re.MULTILINE)
    assert f"\nVersion: {version}\n" in about["METADATA"]
    assert f"\n## [{version}] - 2" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_imports_match_declared_dependencies(wheel: dict[str, bytes], about: dict[str, str]) -> None:
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
    for line in re.findall(r"^Requires-Dist: (.*)$", about["METADATA"], re.MULTILINE):
        name = re.split(r"[^\w.-]", line)[0].replace("-", "_")
        extra = re.search(r"extra == [\"'](\w+)", line)
        if extra is None:
            always.add(name)
        elif extra[1] not in FOR_WORK_ON_IT:
            extras.add(name)
    assert {name: where for name, where in foreign.items() if name not in always | extras} == {}
    assert always <= foreign.keys()
