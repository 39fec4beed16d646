"""CI dependencies are pinned and hashed, and match pyproject.toml; CI actions are pinned too."""

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^([a-z0-9-]+)==(\S+?)(?:\+cpu)? (?:\\\n +)?--hash=sha256:[0-9a-f]{64}", re.MULTILINE)


def test_locks_match_pyproject() -> None:
    """If this fails, pyproject.toml has changed: run `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"]]
    for extra in ("test", "lint", "supply"):
        required += project["optional-dependencies"][extra]
    for python in ("3.10", "3.11", "3.12", "3.13"):
        text = "".join((ROOT / "locks" / name).read_text() for name in (f"python{python}.txt", "torch.txt"))
        locked = dict(LINE.findall(text))
        assert len(locked) == text.count("==")
        for line in required:
            expected = Requirement(line)
            about = {"python_version": python, "python_full_version": f"{python}.0"}
            if not expected.marker or expected.marker.evaluate(about):
                assert expected.specifier.contains(locked[expected.name.replace("_", "-")]), (python, line)


def test_actions_are_pinned_with_minimal_permissions() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        uses = re.findall(r"uses: *(.*)", text)
        assert uses
        assert [use for use in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} +# v[\d.]+.*", use)] == []
        assert re.search(r"^permissions:(?: \{\}|\n  contents: read)$", text, re.MULTILINE), path


def test_make_defaults() -> None:
    command = ["make", "--dry-run", "simulate", "LOCKED="]  # with `AS ?=`, AS would be make's assembler
    assert "--seeds 1000 --as engine" in subprocess.check_output(command, cwd=ROOT, text=True)
