"""What the documents name is there: files, folders, names of the code, options, targets of make.

Checked is what stands in backticks or in code blocks of README.md, CONTRIBUTING.md and docs/, and the
files that docstrings name in backticks. Placeholders (NAME, `...`) and files of models are left out.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import nanospec
from nanospec.cli.options import build_parser

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nanospec", "kernels", "bench", "tests", "docs")
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.is_file()
]
SOURCES = [
    *ROOT.glob("*.py"),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
]
CODE = [path for path in SOURCES if not path.is_relative_to(ROOT / "tests")]
PLACEHOLDER = re.compile(r"\b(NAME|FILE|FOLDER|DRAFT|DIR|PATH|MODEL|OUT)\b|\.\.\.|[<{]|^~|^\./|^https?:")
FILE = re.compile(r"[\w.-]+\.(py|md|png|toml|yml)|Makefile|LICENSE")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?")


@cache
def files() -> frozenset[str]:
    """All files and folders below `FOLDERS` and in the root, from the root, and their bare names."""
    paths = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = {str(path.relative_to(ROOT)) for path in paths}
    return frozenset(found | {f"nanospec/{name}" for name in found if name.startswith("kernels/")})


@cache
def bare_names() -> frozenset[str]:
    return frozenset(name.rsplit("/", 1)[-1] for name in files())


@cache
def words() -> frozenset[str]:
    """Every name and every word in a short string of the code."""
    found: set[str] = set(dir(builtins)) | {part for name in files() for part in re.split(r"[/.]", name)}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("id", "name", "attr", "arg"):
                found.add(str(getattr(node, field, "")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
                found.update(re.findall(r"\w+", node.value))
    return frozenset(found)


@cache
def flags() -> frozenset[str]:
    """Every option of the command line, its commands and the benchmarks."""
    quoted = (re.findall(r'"(--?[a-z][\w-]*)"', path.read_text(encoding="utf-8")) for path in CODE)
    return frozenset({flag for found in quoted for flag in found}).union(*_own_flags())


def _own_flags() -> Iterator[list[str]]:
    for action in build_parser()._actions:
        yield list(action.option_strings)


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def file_is_missing(text: str, near: Path) -> bool:
    """Whether `text` is a file or folder of this repository by its form, and not there."""
    top = text.split("/", 1)[0]
    if PLACEHOLDER.search(text) or re.fullmatch(r"[\w./*-]+", text) is None:
        return False
    if "/" in text and top in (*FOLDERS, ".ci"):
        return not any(ROOT.glob(text.rstrip("/"))) and text.rstrip("/") not in files()
    if "/" in text and FILE.fullmatch(text.rsplit("/", 1)[-1]):  # within the folder that is spoken of
        here = near.parent / text
        return not here.exists() and not any(name.endswith("/" + text) for name in files())
    return FILE.fullmatch(text) is not None and text not in bare_names()


def missing(text: str, near: Path) -> list[str]:
    """What of the code `text` is not there: one word, or a command."""
    if " " in text:
        wrong = [word for word in text.split() if word.startswith("-") and not PLACEHOLDER.search(word)]
        wrong = [f for word in wrong if (f := word.split("=")[0]) not in flags() and re.match(r"--?[a-z]", f)]
        wrong += [word for word in text.split() if file_is_missing(word.strip("'\""), near)]
        if command := re.match(r"(?:\$ )?make ([\w-]+)", text):
            wrong += [command[1]] if command[1] not in targets() else []
        return wrong
    if text.startswith("--"):
        return [] if text.split("=")[0] in flags() else [text]
    if file_is_missing(text, near):
        return [text]
    if FILE.fullmatch(text) or NAME.fullmatch(text) is None or PLACEHOLDER.search(text):
        return []
    return [part for part in re.sub(r"\(.*", "", text).split(".") if part not in words()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    wrong = [part for code in re.findall(r"`([^`\n]+)`", prose) for part in missing(code, document)]
    blocks = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (\S.*)$", prose, flags=re.MULTILINE)
    for line in lines:
        if re.match(r"(\$ )?(python|nanospec|make|pip) ", line):
            wrong += missing(line.split("  #")[0], document)
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_python_of_a_document_work(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "nanospec":
                assert {alias.name for alias in node.names} <= set(nanospec.__all__)


def test_files_that_docstrings_name_are_there() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                named = re.findall(r"`([^`\n]+)`", ast.get_docstring(node) or "")
                words = [word for code in named for word in code.split()]
                wrong += [f"{path.relative_to(ROOT)}: {w}" for w in words if file_is_missing(w, path)]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nanospec/llm.py", []),
        ("nanospec/no.py", ["nanospec/no.py"]),
        ("no.py", ["no.py"]),
        ("bench/results/*.json", []),
        ("bench/results/*.no", ["bench/results/*.no"]),
        ("nanospec/kernels/batch.py", []),
        ("weights/NAME/", []),
        ("SamplingParams", []),
        ("LLM.generate(prompts)", []),
        ("LLM.genarate(prompts)", ["genarate"]),
        ("--tree-width", []),
        ("--three-width", ["--three-width"]),
        ("python run.py --prompt x --spec=none --tree 3", ["--tree"]),
        ("python bench/no.py --repeats 2", ["bench/no.py"]),
        ("make test", []),
        ("make tea", ["tea"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_this_test_sees_what_is_missing(text: str, expected: list[str]) -> None:
    assert missing(text, ROOT / "README.md") == expected
