"""The build of torch that `make` installs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import which_torch

ROOT = Path(__file__).resolve().parents[2]
Offer = Callable[[dict[bool, str]], list[list[str]]]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Fake an environment without torch and GPU, in which pip lists the given versions without or with
    PyTorch's index. Returns the commands run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(which_torch, "has_gpu", lambda: False)

    def install(versions: dict[bool, str]) -> list[list[str]]:
        commands = []

        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            listed = versions[which_torch.INDEX in command]
            return subprocess.CompletedProcess(command, 0, f"torch (x)\nAvailable versions: {listed}\n", "")

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(which_torch, "reachable", lambda index: True in versions)
        return commands

    return install


def test_pip_settings_have_priority(offer: Offer) -> None:
    offer({False: "99.1.0+cpu, 2.14.0, 2.13.0+cpu, 2.13.0, 2.12.0+cpu", True: "2.14.0+cpu"})
    assert which_torch.main("auto") == "torch==2.13.0+cpu"


def test_pytorch_index_is_second(offer: Offer) -> None:
    offer({False: "2.14.0, 2.13.0", True: "2.14.0+cpu, 2.14.0, 1.0+cpu"})
    assert which_torch.main("auto") == f"--extra-index-url {which_torch.INDEX} torch==2.14.0+cpu"


@pytest.mark.parametrize("versions", [{False: "2.14.0"}, {False: "", True: "1.13.0+cpu"}])
def test_pypi_is_last(versions: dict[bool, str], offer: Offer, capsys: pytest.CaptureFixture[str]) -> None:
    offer(versions)
    assert which_torch.main("cpu") == ""
    assert "neither pip's settings nor" in capsys.readouterr().err


def test_no_lookup_with_gpu_explicit_choice_or_installed_torch(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = offer({False: "2.13.0+cpu"})
    assert which_torch.main("cuda") == ""
    monkeypatch.setattr(which_torch, "has_gpu", lambda: True)
    assert which_torch.main("auto") == ""
    assert commands == []
    assert which_torch.main("cpu") == "torch==2.13.0+cpu"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert which_torch.main("cpu") == ""
    assert len(commands) == 1
