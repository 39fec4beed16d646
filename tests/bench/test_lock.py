"""What CI installs is pinned and hashed, and is what pyproject.toml asks for; what a bill lists."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.lock import APART, EXTRAS, builds, lines
from bench.sbom import core, needed

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "locks"
LINE = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_locks_have_what_is_asked_for(python: str) -> None:
    """If this fails, pyproject.toml has changed: `make lock`."""
    head, *rest = (LOCKS / f"python{python}.txt").read_text(encoding="utf-8").splitlines()
    assert head.startswith("# Made by `make lock`")
    found = [LINE.fullmatch(line) for line in rest]
    assert None not in found
    locked = {match[1]: match[2] for match in found if match}
    assert not any(map(APART.match, locked))
    [torch] = re.findall(r"^torch==([\d.]+)\+cpu \\$", (LOCKS / "torch.txt").read_text(), re.MULTILINE)
    for line in requires("nanospec") or ():
        wanted = Requirement(line)
        about = {"python_version": python, "python_full_version": f"{python}.0"}
        extras = [{**about, "extra": extra} for extra in EXTRAS.split(",")]
        if not wanted.marker or any(map(wanted.marker.evaluate, extras)):
            assert wanted.specifier.contains({**locked, "torch": torch}[wanted.name.replace("_", "-")]), line


def test_builds_are_the_newest_that_all_pythons_have() -> None:
    page = "".join(
        f'<a href="/torch.whl#sha256={digit * 64}" data-x="y">torch-{version}+cpu-{tag}.whl</a><br/>'
        for digit, version, tag in (
            ("1", "2.9.0", "cp310-cp310-manylinux_2_28_x86_64"),
            ("2", "2.9.0", "cp313-cp313-manylinux_2_28_x86_64"),
            ("3", "2.9.0", "cp313-cp313t-manylinux_2_28_x86_64"),
            ("4", "2.10.0", "cp310-cp310-manylinux_2_28_x86_64"),
            ("5", "2.10.0", "cp313-cp313-manylinux_2_28_x86_64"),
            ("6", "2.10.0", "cp313-cp313-manylinux_2_28_aarch64"),
            ("7", "2.11.0", "cp313-cp313-manylinux_2_28_x86_64"),
            ("8", "2.12.0", "cp310-cp310-manylinux_2_28_x86_64"),
            ("9", "2.12.0", "cp313-cp313-manylinux_2_28_x86_64"),
        )
    )
    assert builds(page, ">=2.8,<2.12", {"cp310", "cp313"}) == ("2.10.0", ["4" * 64, "5" * 64])
    with pytest.raises(ValueError, match=r"no torch>=3 for all of cp310"):
        builds(page, ">=3", {"cp310"})


def test_lines_leave_out_what_is_apart() -> None:
    names = ("nanospec", "torch", "nvidia-cublas", "cuda-bindings", "Prometheus_Client", "jinja2")
    archive = {"archive_info": {"hashes": {"sha256": "0" * 64}}}
    about = [{"metadata": {"name": name, "version": "1.0"}, "download_info": archive} for name in names]
    found = [line.split(" ")[0] for line in lines(json.dumps({"install": about}))]
    assert found == ["jinja2==1.0", "prometheus-client==1.0"]


def test_a_bill_lists_what_the_core_leads_to() -> None:
    needs = {"nanospec": {"torch-x"}, "torch-x": {"sympy"}, "sympy": {"torch-x"}}
    expected = {"root": ["Torch_x==2"], "Torch_x==2": ["sympy==1"], "sympy==1": ["Torch_x==2"]}
    stated = {**expected, "root": ["Torch_x==2", "ray==3"], "Torch_x==2": ["sympy==1", "ray==3"]}
    names = ("Torch_x==2", "sympy==1", "ray==3")
    document = {
        "metadata": {"component": {"bom-ref": "root", "name": "nanospec"}},
        "components": [{"bom-ref": ref, "name": ref.split("==")[0]} for ref in names],
        "dependencies": [{"ref": "ray==3"}, *({"ref": ref, "dependsOn": on} for ref, on in stated.items())],
    }
    found = core(document, needs)
    assert [part["name"] for part in found["components"]] == ["Torch_x", "sympy"]
    assert {entry["ref"]: entry["dependsOn"] for entry in found["dependencies"]} == expected


def test_what_is_needed_leaves_extras_out() -> None:
    needs = needed("nanospec")
    assert {"torch", "numpy", "jinja2"} <= needs["nanospec"]
    assert {"sympy", "markupsafe", "mpmath"} <= set().union(*needs.values())
    assert not {"ray", "pytest", "mypy"} & set().union(*needs.values())


def test_actions_are_pinned_and_may_do_little() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        uses = re.findall(r"uses: *(.*)", text)
        assert uses
        assert [use for use in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} +# v[\d.]+.*", use)] == []
        assert re.search(r"^permissions:(?: \{\}|\n  contents: read)$", text, re.MULTILINE), path


def test_make_takes_its_own_defaults() -> None:
    """`AS` is a variable of make itself, so `AS ?=` would be the assembler."""
    asked = ["make", "--dry-run", "simulate", "LOCKED="]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--seeds 1000 --as engine" in found
