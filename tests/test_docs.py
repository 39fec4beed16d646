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
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGELOG = ROOT / "CHANGELOG.md"
SOURCES = [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py")))]
PLACEHOLDER = re.compile(r"\b(NAME|FILE|FOLDER|DRAFT|DIR|PATH|MODEL|OUT)\b|\.\.\.|[<{]|^~|^\./|^https?:")
FILE = re.compile(r"[\w.-]+\.(py|md|png|toml|yml)|Makefile|LICENSE")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?")
DATA = re.compile(r".*\.(json|jsonl|html|svg|gguf|safetensors|whl|jinja|txt|h|cpp)")  # of users, or linked to
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```output\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NEEDS_MODEL = "# needs the model\n"
LONG = ("extend-drafter.md",)


@cache
def files() -> frozenset[str]:
    """Return the paths of all files and folders in the root and below `FOLDERS`."""
    paths = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    result = {str(path.relative_to(ROOT)) for path in paths}
    return frozenset(result | {f"nanospec/{name}" for name in result if name.startswith("kernels/")})


@cache
def code() -> dict[Path, ast.Module]:
    """Return the syntax trees of all files but the tests."""
    ours = [path for path in SOURCES if not path.is_relative_to(ROOT / "tests")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in ours}


@cache
def words() -> frozenset[str]:
    """Return all names, and all words in short strings, of the code."""
    result: set[str] = set(dir(builtins)) | {part for name in files() for part in re.split(r"[/.]", name)}
    for tree in code().values():
        for node in ast.walk(tree):
            result.update(str(getattr(node, field, "")) for field in ("id", "name", "attr", "arg"))
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
    for path, tree in code().items():
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
    found = {flag for path in code() for flag in re.findall(r'"(--?[a-z][\w-]*)"', path.read_text("utf-8"))}
    parsers = build_parser(full=True), build_server_parser(full=True)
    return frozenset(found).union(*(parser._option_string_actions for parser in parsers))


def file_is_missing(text: str, near: Path) -> bool:
    """Return whether `text` looks like a file or folder of this repository but does not exist."""
    top, name = text.split("/", 1)[0], text.rstrip("/")
    if PLACEHOLDER.search(text) or re.fullmatch(r"[\w./*-]+", text) is None:
        return False
    if "/" in text and top in (*FOLDERS, ".ci"):
        return not any(ROOT.glob(name)) and name not in files()
    if FILE.fullmatch(text.rsplit("/", 1)[-1]):  # relative to another folder
        return not (near.parent / text).exists() and not any(
            f"/{known}".endswith(f"/{text}") for known in files()
        )
    return False


def missing(text: str, near: Path) -> list[str]:
    """Return the missing parts of the code `text`, a word or a command."""
    if " " in text:
        options = [word.split("=")[0] for word in text.split() if not PLACEHOLDER.search(word)]
        wrong = [name for name in options if re.match(r"--?[a-z]", name) and name not in flags()]
        wrong += [word for word in text.split() if file_is_missing(word.strip("'\""), near)]
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return wrong + [name for name in re.findall(r"^(?:\$ )?make ([\w-]+)", text) if name not in targets]
    if text.startswith("--"):
        return [] if text.split("=")[0] in flags() else [text]
    if file_is_missing(text, near):
        return [text]
    if FILE.fullmatch(text) or DATA.fullmatch(text) or not NAME.fullmatch(text) or PLACEHOLDER.search(text):
        return []
    parts, known = re.sub(r"\(.*", "", text).split("."), definitions()
    return [part for part in parts if part not in words()] or [
        f"{owner}.{name}" for owner, name in pairwise(parts) if owner in known and name not in known[owner]
    ]


def relative_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_path)
def test_names_and_commands_of_a_document_are_valid(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    wrong = [part for quoted in re.findall(r"`([^`\n]+)`", prose) for part in missing(quoted, document)]
    blocks = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    for line in (*lines, *re.findall(r"^    (\S.*)$", prose, flags=re.MULTILINE)):
        if re.match(r"(\$ )?(python|nanospec|make) ", line):
            wrong += missing(line.split("  #")[0], document)
    assert wrong == []
    for line in re.findall(r"(?:python run\.py|nanospec) (-[^`\n]*)", text):
        if not re.search(r"\[|\||-h\b|--help|--version", line):
            parse(shlex.split(line, comments=True))


@pytest.mark.parametrize("document", [*DOCUMENTS, CHANGELOG], ids=relative_path)
def test_links_and_pictures_of_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s]*)", text) + re.findall(r'<img src="([^"]+)"', text)
    for name, _, heading in (link.partition("#") for link in links):
        target = document.parent / name if name else document
        assert target.exists(), name
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8") if heading else "", re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", words).lower().replace(" ", "-") for words in headings]
        assert not heading or heading in anchors, f"{name}#{heading}"
    if document == ROOT / "docs" / "README.md":
        assert {path.name for path in (ROOT / "docs").glob("[!R]*.md")} <= set(links)


def test_tests_selected_by_name_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for path in (ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")):
        for name in re.findall(r"-k (\w+)", path.read_text(encoding="utf-8")):
            assert f"{name}(" in tests, f"{path.name}: -k {name}"


def snippets(document: Path) -> list[tuple[str, str]]:
    """Return a document's python blocks, each with its expected output."""
    return BLOCK.findall(document.read_text(encoding="utf-8"))


_LLM, _loaded = llm.LLM, dict[str, llm.LLM]()


def loaded_once(model: str, **options: Any) -> llm.LLM:
    """Return an LLM, shared by documents that load the same model."""
    key = repr((model, sorted(options.items())))
    if key not in _loaded:
        _loaded[key] = _LLM(model, **options)
    return _loaded[key]


@pytest.mark.parametrize(
    "document",
    [pytest.param(p, marks=[pytest.mark.long] * (p.name in LONG)) for p in DOCUMENTS if snippets(p)],
    ids=relative_path,
)
def test_snippets_of_a_document_run(document: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for path in ROOT.glob("[!.]*"):  # snippets must not write into the checkout
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "LLM", loaded_once)
    model_is_there = (ROOT / "weights/smollm2-135m-instruct/model.safetensors").is_file()
    left_out, names = 0, dict[str, Any](__name__="__main__")
    for snippet, output in snippets(document):
        for node in ast.walk(ast.parse(snippet)):  # also in skipped snippets
            if isinstance(node, ast.ImportFrom) and node.module == "nanospec":
                assert {alias.name for alias in node.names} <= set(nanospec.__all__)
        if snippet.startswith(NEEDS_MODEL) and not model_is_there:
            left_out += 1
            continue
        exec(compile(snippet, document.name, "exec"), names)
        printed = capsys.readouterr().out
        assert not output or printed == output
    if left_out:
        pytest.skip(f"{left_out} snippets need smollm2-135m-instruct")


def test_files_in_docstrings_exist() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(code().get(path) or ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                quoted = " ".join(re.findall(r"`([^`\n]+)`", ast.get_docstring(node, clean=False) or ""))
                wrong += [f"{path}: {word}" for word in quoted.split() if file_is_missing(word, path)]
    assert wrong == []


def test_missing_names_are_detected() -> None:
    for text, expected in (
        ("nanospec/llm.py bench/results/*.json nanospec/kernels/batch.py weights/NAME/ nanospec.kernels", ""),
        ("SamplingParams LLM.generate(prompts) AutoPolicy.observe ModelDrafter.admit verify.commit", ""),
        ("results.jsonl --tree-width", ""),
        ("nanospec/no.py no.py no/llm.py bench/results/*.no LLM.schedule verify.lay_out --tree", None),
    ):
        for word in text.split():
            assert missing(word, ROOT / "README.md") == ([word] if expected is None else []), word
    command = "make tea && python bench/no.py --repeats 2 --tree 3 && make test"
    assert missing(command, ROOT / "README.md") == ["--tree", "bench/no.py", "tea"]
