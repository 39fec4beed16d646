"""For the Makefile: which build of torch to install, as arguments of pip; says on stderr what that downloads.

    python bench/which_torch.py auto|cpu|cuda

PyPI's torch for Linux brings CUDA. Where there is no GPU (auto), or where it is asked for (cpu), this looks
for a build for CPUs alone, first where pip's settings point, then in PyTorch's own index; if neither has one
that pyproject.toml permits, PyPI's it is. Needs pip and nothing else.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet

INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 5  # until a silent index counts as unreachable
PERMITTED = re.compile(r'^ *"torch([^;"]*)"', re.MULTILINE)  # among the dependencies
SMALL = "0.4 GB (.venv is 1.7 GB then). For a GPU: make TORCH=cuda"
LARGE = "2.8 GB (4.9 GB on disk)"


def has_gpu() -> bool:
    """Whether this machine has a GPU that torch can use, as far as its driver shows."""
    return any(map(shutil.which, ("nvidia-smi", "rocminfo"))) or Path("/dev/nvidia0").exists()


def reachable(index: str) -> bool:
    """Return whether an index answers soon."""
    try:
        return bool(urllib.request.urlopen(f"{index}/torch/", timeout=SECONDS))
    except (OSError, ValueError):
        return False


def newest_for_cpus(options: list[str], permitted: str) -> str | None:
    """The newest build for CPUs that pip finds with these options and `permitted` allows, such as
    2.13.0+cpu."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "torch", *options]
    done = subprocess.run(asked, capture_output=True, text=True)  # lists the newest first
    found = re.findall(r"[\w.]+\+cpu\b", done.stdout)
    return next((version for version in found if version in SpecifierSet(permitted)), None)


def main(wanted: str) -> str:
    """What pip is to be given, "" if PyPI's build will do."""
    if importlib.util.find_spec("torch") is not None:
        return ""
    [permitted] = PERMITTED.findall(Path("pyproject.toml").read_text(encoding="utf-8"))
    if wanted == "cuda" or (wanted == "auto" and has_gpu()):
        print(f"This downloads torch with CUDA, {LARGE}; without: make TORCH=cpu", file=sys.stderr)
        return ""
    for options in ([], ["--extra-index-url", INDEX]):
        if (not options or reachable(INDEX)) and (version := newest_for_cpus(options, permitted)):
            print(f"There is no GPU here: this downloads torch {version}, {SMALL}", file=sys.stderr)
            return " ".join([*options, f"torch=={version}"])
    print(
        f"This downloads torch with CUDA, {LARGE}: neither pip's settings nor {INDEX} have one for CPUs.",
        file=sys.stderr,
    )
    return ""


if __name__ == "__main__":
    print(main(sys.argv[1]))
