"""`make` installs the right build of torch."""

import subprocess
from pathlib import Path

import pytest

from bench import which_torch

ROOT = Path(__file__).resolve().parents[2]
INDEX = which_torch.INDEX
EXTRA = f"--extra-index-url {INDEX}"


@pytest.mark.parametrize(
    ("wanted", "pip", "index", "expected"),
    [
        ("auto", "99.1.0+cpu, 2.14.0, 2.13.0+cpu, 2.13.0, 2.12.0+cpu", "2.14.0+cpu", "torch==2.13.0+cpu"),
        ("auto", "2.14.0, 2.13.0", "2.14.0+cpu, 2.14.0, 1.0+cpu", f"{EXTRA} torch==2.14.0+cpu"),
        ("cpu", "2.14.0", None, ""),
        ("cuda", "2.13.0+cpu", None, ""),
        ("auto on a GPU", "2.13.0+cpu", None, ""),
        ("cpu, installed", "2.13.0+cpu", None, ""),
    ],
)
def test_cpu_build_is_chosen_without_gpu(
    wanted: str, pip: str, index: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip` and `index` are the versions that pip lists without and with PyTorch's index (None: offline)."""
    lookups = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        lookups.append(command)
        listed = index if INDEX in command else pip
        return subprocess.CompletedProcess(command, 0, f"torch (x)\nAvailable versions: {listed}\n", "")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if "installed" in wanted else None)
    monkeypatch.setattr(which_torch, "has_gpu", lambda: "GPU" in wanted)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(which_torch, "reachable", lambda url: index is not None)
    assert which_torch.main(wanted.split()[0].rstrip(",")) == expected
    if wanted in ("cuda", "auto on a GPU", "cpu, installed"):
        assert not lookups
