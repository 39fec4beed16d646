"""Documents refer to existing files, folders, code names, options and make targets, and their snippets run.

Checks text in backticks and code blocks of README.md, CONTRIBUTING.md and docs/. Placeholders (NAME, `...`)
and files of models are ignored.

The python blocks of a document run in order as one program. Their output must match the following ```output
block, if any. A block that begins with `# needs the model` is skipped without it."""

import builtins
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import diagrams
from nanospec import llm
from nanospec.apps.cli.parser import parse

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nanospec", "examples", "bench", "campaigns", "tests", "docs")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGELOG = ROOT / "CHANGELOG.md"
PLACEHOLDER = re.compile(r"\b(NAME|FILE|FOLDER|DRAFT|DIR|PATH|MODEL|OUT)\b|\.\.\.|[<{]|^~|^\./|^https?:")
FILE = re.compile(r"[\w.-]+\.(py|md|png|toml|yml)|Makefile|LICENSE")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```output\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@cache
def files() -> frozenset[str]:
    """Return the paths of all files and folders in the root and below `FOLDERS`."""
    paths = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return frozenset(str(path.relative_to(ROOT)) for path in paths)


@cache
def code() -> str:
    """Return the text of all Python files but the tests."""
    paths = [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
    return "\n".join(path.read_text("utf-8") for path in paths if not path.is_relative_to(ROOT / "tests"))


@cache
def words() -> frozenset[str]:
    """Return all words in the code and in the names of files."""
    return frozenset(dir(builtins)).union(
        re.findall(r"\w+", code()), *map(re.compile(r"[/.]").split, files())
    )


def option_is_missing(name: str) -> bool:
    return name.strip("-").replace("-", "_") not in words() and f'"{name}"' not in code()


def file_is_missing(text: str, near: Path) -> bool:
    """Return whether `text` looks like a file or folder of this repository but does not exist."""
    top, name = text.split("/", 1)[0], text.rstrip("/")
    if PLACEHOLDER.search(text) or re.fullmatch(r"[\w./*-]+", text) is None:
        return False
    if "/" in text and top in (*FOLDERS, ".ci"):
        return not any(ROOT.glob(name)) and name not in files()
    if FILE.fullmatch(text.rsplit("/", 1)[-1]):  # relative to another folder
        return not (near.parent / text).exists() and not any(
            f"/{name}".endswith(f"/{text}") for name in files()
        )
    return False


def missing(text: str, near: Path) -> list[str]:
    """Return the missing parts of the code `text`, a word or a command."""
    if " " in text:
        options = [word.split("=")[0] for word in text.split() if not PLACEHOLDER.search(word)]
        wrong = [name for name in options if re.match(r"--?[a-z]", name) and option_is_missing(name)]
        wrong += [word for word in text.split() if file_is_missing(word.strip("'\""), near)]
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return wrong + [name for name in re.findall(r"^(?:\$ )?make ([\w-]+)", text) if name not in targets]
    if text.startswith("--"):
        return [text] if option_is_missing(text.split("=")[0]) else []
    if file_is_missing(text, near):
        return [text]
    if not NAME.fullmatch(text) or PLACEHOLDER.search(text):
        return []
    return [part for part in re.sub(r"\(.*", "", text).split(".") if part not in words()]


def relative_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
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


def test_committed_diagrams_are_current() -> None:
    for draw in (diagrams.architecture, diagrams.request):
        committed = diagrams.ROOT / "docs" / "pictures" / f"{draw.__name__}.svg"
        assert committed.read_text(encoding="utf-8") == draw(), "run `python -m bench.diagrams`"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(p, marks=[pytest.mark.long] * (p.name == "extend-drafter.md"))
        for p in DOCUMENTS
        if snippets(p)
    ],
    ids=relative_path,
)
def test_snippets_of_a_document_run(document: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for path in ROOT.glob("[!.]*"):  # snippets must not write into the checkout
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "LLM", loaded_once)
    model_is_there = (ROOT / "weights/smollm2-135m-instruct/model.safetensors").is_file()
    names = dict[str, Any](__name__="__main__")
    for snippet, output in snippets(document):
        if model_is_there or not snippet.startswith("# needs the model\n"):
            exec(compile(snippet, document.name, "exec"), names)
            printed = capsys.readouterr().out
            assert not output or printed == output
