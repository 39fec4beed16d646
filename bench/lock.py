"""For `make lock`: what CI installs, to the byte, in locks/: one file for each Python named, and torch.txt.

    python bench/lock.py python3.10 python3.11 ...

Each Python asks pip what it would install for the tests, lint and the tools behind releases, newest first;
the file is pip's answer, a line with version and hash for each package. torch is apart, since its builds for
CPUs have an index of their own: torch.txt has the hashes that this index states for the newest version that
has a build for every Python named, and stays as it is where the index does not answer. The packages that
only torch's builds with CUDA need are left out. Linux on x86-64 alone; `make test LOCKED=1` installs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.version import Version

from bench.which_torch import INDEX, PERMITTED, SECONDS

LOCKS = Path("locks")
EXTRAS = "test,lint,supply"
APART = re.compile(r"torch$|nvidia-|cuda-")
BUILD = re.compile(
    r'#sha256=([0-9a-f]{64})"[^>]*>torch-([\d.]+)\+cpu-(cp3\d+)-cp3\d+-\w*linux\w*_x86_64\.whl'
)
HEAD = "# Made by `make lock`; see bench/lock.py.\n"


def builds(page: str, permitted: str, tags: set[str]) -> tuple[str, list[str]]:
    """The newest permitted version with a build for every tag, such as cp310, and the hashes of these builds;
    from the index's page."""
    found: dict[str, dict[str, str]] = {}
    for digest, version, tag in BUILD.findall(page):
        if tag in tags and version in SpecifierSet(permitted):
            found.setdefault(version, {})[tag] = digest
    whole = [version for version, hashes in found.items() if hashes.keys() == tags]
    if not whole:
        raise ValueError(f"{INDEX} has no torch{permitted} for all of {', '.join(sorted(tags))}")
    newest = max(whole, key=Version)
    return newest, [found[newest][tag] for tag in sorted(tags)]


def lock_torch(tags: set[str]) -> str:
    """Write torch.txt if the index answers; the version that it names, without the build."""
    [permitted] = PERMITTED.findall(Path("pyproject.toml").read_text(encoding="utf-8"))
    path = LOCKS / "torch.txt"
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=SECONDS) as answer:
            version, hashes = builds(answer.read().decode(), permitted, tags)
    except OSError as error:
        print(f"{path} stays as it is: {INDEX} does not answer ({error})", file=sys.stderr)
    else:
        lines = [f"torch=={version}+cpu", *(f"    --hash=sha256:{digest}" for digest in hashes)]
        path.write_text(HEAD + " \\\n".join(lines) + "\n", encoding="utf-8")
    return re.findall(r"^torch==([\d.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)[0]


def lines(report: str) -> list[str]:
    """A line for each package that pip's report would install, by name."""
    found = {}
    for package in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        if name != "nanospec" and not APART.match(name):
            [digest] = [package["download_info"]["archive_info"]["hashes"]["sha256"]]
            found[name] = f"{name}=={package['metadata']['version']} --hash=sha256:{digest}"
    return [found[name] for name in sorted(found)]


def lock(python: str, torch: str) -> Path:
    """Write the file of this Python."""
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    path = LOCKS / f"python{subprocess.check_output(asked, text=True).strip()}.txt"
    with tempfile.TemporaryDirectory() as folder:
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "--upgrade", "pip"], check=True)  # an older one downloads what it reports
        options = ["--dry-run", "--only-binary", ":all:", "--report", f"{folder}/report.json"]
        subprocess.run([*pip, *options, f"torch=={torch}", f".[{EXTRAS}]"], check=True)
        report = Path(folder, "report.json").read_text(encoding="utf-8")
    path.write_text(HEAD + "\n".join(lines(report)) + "\n", encoding="utf-8")
    return path


def main(pythons: list[str]) -> None:
    """Command line."""
    tag = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tags = {subprocess.check_output([python, "-c", tag], text=True).strip() for python in pythons}
    LOCKS.mkdir(exist_ok=True)
    torch = lock_torch(tags)
    for python in pythons:
        print(lock(python, torch))


if __name__ == "__main__":
    main(sys.argv[1:])
