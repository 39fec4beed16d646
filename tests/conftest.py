"""Settings and fixtures for all tests."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.interpreted import order_programs_by  # before triton is imported

# isort: split
from tests.alphabet import folder  # noqa: F401
from tests.processors import built_for, compiled_for, other_library  # noqa: F401

WEIGHTS = Path(__file__).parent.parent / "weights"

# Tests have no deadlines: in a fresh clone, for example, Hypothesis reads Unicode tables first.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Ctrl-C reaches tests and their subprocesses even if the parent ignores it, as with `make test &`.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already share the cores
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the order of Triton programs by the test's id."""
    order_programs_by(item.nodeid)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; tests that need it are skipped without it."""
    path = WEIGHTS / "smollm2-135m-instruct"
    if not (path / "model.safetensors").is_file():
        pytest.skip(f"needs {path.name}: nanospec fetch {path.name}")
    return path
