"""Choose the build of torch for the Makefile. Prints arguments for pip, and the download size on stderr.

    python bench/which_torch.py auto|cpu|cuda [==VERSION]

PyPI's torch for Linux includes CUDA. With `cpu`, or with `auto` on a machine without a GPU, this script looks
for a CPU-only build in pip's configured indexes and then in PyTorch's index. If neither has a version that
pyproject.toml permits (or of VERSION), PyPI's build is used. Requires only pip.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet

INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 5  # timeout to reach an index
PERMITTED = re.compile(r'^ *"torch([^;"]*)"', re.MULTILINE)  # the dependency in pyproject.toml
SMALL = "0.4 GB (1.7 GB for .venv). For a GPU: make TORCH=cuda"
LARGE = "2.8 GB (4.9 GB on disk)"


def has_gpu() -> bool:
    """Return whether this machine has a GPU driver."""
    return any(map(shutil.which, ("nvidia-smi", "rocminfo"))) or Path("/dev/nvidia0").exists()


def reachable(index: str) -> bool:
    """Return whether an index answers within `SECONDS`."""
    try:
        return bool(urllib.request.urlopen(f"{index}/torch/", timeout=SECONDS))
    except (OSError, ValueError):
        return False


def newest_for_cpus(options: list[str], permitted: str) -> str | None:
    """Return the newest CPU build that pip finds with `options` and that `permitted` allows, such as
    2.13.0+cpu; None if there is none."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *options]
    done = subprocess.run(command, capture_output=True, text=True)  # newest first
    found = re.findall(r"[\w.]+\+cpu\b", done.stdout)
    return next((version for version in found if version in SpecifierSet(permitted)), None)


def main(wanted: str, *only: str) -> str:
    """Return the arguments for pip; "" if torch is installed or PyPI's build is to be used."""
    if importlib.util.find_spec("torch") is not None:
        return ""
    [permitted] = only or PERMITTED.findall(Path("pyproject.toml").read_text(encoding="utf-8"))
    if wanted == "cuda" or (wanted == "auto" and has_gpu()):
        print(f"Downloading torch with CUDA, {LARGE}. For the CPU build: make TORCH=cpu", file=sys.stderr)
        return ""
    for options in ([], ["--extra-index-url", INDEX]):
        if (not options or reachable(INDEX)) and (version := newest_for_cpus(options, permitted)):
            print(f"Downloading torch {version} without CUDA, {SMALL}", file=sys.stderr)
            return " ".join([*options, f"torch=={version}"])
    print(
        f"Downloading torch with CUDA, {LARGE}: no CPU build was found in pip's settings or {INDEX}.",
        file=sys.stderr,
    )
    return ""


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
