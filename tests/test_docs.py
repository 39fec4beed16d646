"""Documents refer to existing files, folders, code names, options and make targets, and their snippets run.

Checks text in backticks and code blocks of README.md, CONTRIBUTING.md and docs/, and files that docstrings
name in backticks. Placeholders (NAME, `...`) and files of models are ignored.

The python blocks of a document run in order as one program. Their output must match the following ```output
block, if any. A block that begins with `# needs the model` is skipped without it.
"""

from __future__ import annotations

import ast
import builtins
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nanospec
from nanospec import llm
from nanospec.apps.cli.parser import build_parser, parse
from nanospec.apps.cli.serve import build_parser as build_server_parser

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nanospec", "kernels", "bench", "campaigns", "tests", "docs")
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
DATA = re.compile(r".*\.(json|jsonl|html|svg|gguf|safetensors|whl|jinja|txt|h|cpp)")  # of users, or linked to
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```output\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NEEDS_MODEL = "# needs the model\n"


@cache
def files() -> frozenset[str]:
    """Return the paths of all files and folders in the root and below `FOLDERS`."""
    paths = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    result = {str(path.relative_to(ROOT)) for path in paths}
    return frozenset(result | {f"nanospec/{name}" for name in result if name.startswith("kernels/")})


@cache
def bare_names() -> frozenset[str]:
    return frozenset(name.rsplit("/", 1)[-1] for name in files())


@cache
def words() -> frozenset[str]:
    """Return all names, and all words in short strings, of the code."""
    result: set[str] = set(dir(builtins)) | {part for name in files() for part in re.split(r"[/.]", name)}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("id", "name", "attr", "arg"):
                result.add(str(getattr(node, field, "")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
                result.update(re.findall(r"\w+", node.value))
    return frozenset(result)


@cache
def definitions() -> dict[str, set[str]]:
    """Return the definitions of each module (by its bare name, at any depth), the contents of each package,
    and the members of each class, including its bases'."""
    result: defaultdict[str, set[str]] = defaultdict(set)
    result["nanospec"].add("kernels")
    bases: dict[str, list[str]] = {}
    for path in CODE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        result[path.parent.name if path.stem == "__init__" else path.stem] |= set(defined(tree))
        result[path.parent.name].add(path.stem)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                result[node.name] |= set(defined(node))
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for _ in range(3):  # for several levels of inheritance
        for name, parents in bases.items():
            result[name].update(*(result[parent] for parent in parents if parent in bases))
    return dict(result)


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


@cache
def flags() -> frozenset[str]:
    """Return all options of the command line, its commands and the benchmarks."""
    quoted = (re.findall(r'"(--?[a-z][\w-]*)"', path.read_text(encoding="utf-8")) for path in CODE)
    return frozenset({flag for result in quoted for flag in result}).union(*_own_flags())


def _own_flags() -> Iterator[list[str]]:
    for parser in (build_parser(full=True), build_server_parser(full=True)):
        for action in parser._actions:
            yield list(action.option_strings)


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def file_is_missing(text: str, near: Path) -> bool:
    """Return whether `text` looks like a file or folder of this repository but does not exist."""
    top = text.split("/", 1)[0]
    if PLACEHOLDER.search(text) or re.fullmatch(r"[\w./*-]+", text) is None:
        return False
    if "/" in text and top in (*FOLDERS, ".ci"):
        return not any(ROOT.glob(text.rstrip("/"))) and text.rstrip("/") not in files()
    if "/" in text and FILE.fullmatch(text.rsplit("/", 1)[-1]):  # relative to another folder
        here = near.parent / text
        return not here.exists() and not any(name.endswith("/" + text) for name in files())
    return FILE.fullmatch(text) is not None and text not in bare_names()


def missing(text: str, near: Path) -> list[str]:
    """Return the missing parts of the code `text`, a word or a command."""
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
    if FILE.fullmatch(text) or DATA.fullmatch(text) or not NAME.fullmatch(text) or PLACEHOLDER.search(text):
        return []
    parts = re.sub(r"\(.*", "", text).split(".")
    known = definitions()
    return [part for part in parts if part not in words()] or [
        f"{owner}.{name}" for owner, name in pairwise(parts) if owner in known and name not in known[owner]
    ]


def relative_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_path)
def test_names_in_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    wrong = [part for code in re.findall(r"`([^`\n]+)`", prose) for part in missing(code, document)]
    blocks = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (\S.*)$", prose, flags=re.MULTILINE)
    for line in lines:
        if re.match(r"(\$ )?(python|nanospec|make) ", line):
            wrong += missing(line.split("  #")[0], document)
    assert wrong == []


def test_tests_selected_by_name_exist() -> None:
    for path in (ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")):
        for name in re.findall(r"-k (\w+)", path.read_text(encoding="utf-8")):
            assert any(
                f"{name}(" in test.read_text(encoding="utf-8") for test in (ROOT / "tests").rglob("test_*.py")
            ), f"{path.name}: -k {name}"


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=relative_path)
def test_links_and_pictures_of_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s]*)", text) + re.findall(r'<img src="([^"]+)"', text)
    wrong = []
    for link in links:
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (heading and heading not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def anchors(document: Path) -> list[str]:
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_tour_links_to_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "docs").glob("[!R]*.md") if f"({path.name})" not in index] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_path)
def test_command_lines_of_a_document_are_valid(document: Path) -> None:
    for line in re.findall(r"(?:python run\.py|nanospec) (-[^`\n]*)", document.read_text(encoding="utf-8")):
        if not re.search(r"\[|\||-h\b|--help|--version", line):
            parse(shlex.split(line, comments=True))


def snippets(document: Path) -> list[tuple[str, str]]:
    """Return a document's python blocks, each with its expected output."""
    return BLOCK.findall(document.read_text(encoding="utf-8"))


WITH_SNIPPETS = [path for path in DOCUMENTS if snippets(path)]


LONG = ("extend-drafter.md",)


@pytest.mark.parametrize(
    "document",
    [pytest.param(p, marks=pytest.mark.long) if p.name in LONG else p for p in WITH_SNIPPETS],
    ids=relative_path,
)
def test_snippets_of_a_document_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ROOT.glob("[!.]*"):  # snippets must not write into the checkout
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "LLM", loaded_once)
    model_is_there = (ROOT / "weights/smollm2-135m-instruct/model.safetensors").is_file()
    left_out, names = 0, dict[str, Any](__name__="__main__")
    for code, output in snippets(document):
        for node in ast.walk(ast.parse(code)):  # also in skipped snippets
            if isinstance(node, ast.ImportFrom) and node.module == "nanospec":
                assert {alias.name for alias in node.names} <= set(nanospec.__all__)
        if code.startswith(NEEDS_MODEL) and not model_is_there:
            left_out += 1
            continue
        exec(compile(code, document.name, "exec"), names)
        printed = capsys.readouterr().out
        assert not output or printed == output
    if left_out:
        pytest.skip(f"{left_out} snippets need smollm2-135m-instruct")


_LLM, _loaded = llm.LLM, dict[str, llm.LLM]()


def loaded_once(model: str, **options: Any) -> llm.LLM:
    """Return an LLM, shared by documents that load the same model."""
    key = repr((model, sorted(options.items())))
    if key not in _loaded:
        _loaded[key] = _LLM(model, **options)
    return _loaded[key]


def test_files_in_docstrings_exist() -> None:
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
        ("LLM.schedule", ["LLM.schedule"]),
        ("Scheduler.schedule", []),
        ("AutoPolicy.observe", []),
        ("ModelDrafter.admit", []),  # its base's
        ("verify.commit", []),
        ("verify.lay_out", ["verify.lay_out"]),
        ("nanospec.kernels", []),
        ("results.jsonl", []),
        ("--tree-width", []),
        ("--three-width", ["--three-width"]),
        ("python run.py --prompt x --spec=none --tree 3", ["--tree"]),
        ("python bench/no.py --repeats 2", ["bench/no.py"]),
        ("make test", []),
        ("make tea", ["tea"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_names_are_detected(text: str, expected: list[str]) -> None:
    assert missing(text, ROOT / "README.md") == expected
