"""Fuzz tests: every input must give a correct result or a clear error message.

A fuzz target is a file target_NAME.py in this folder with

    SEEDS           list[bytes], valid and almost valid inputs to start from
    one(data)       runs the code on an input and raises if there is a bug. `refusal.answer` accepts proper
                    error messages
    mutate(data, rng) -> bytes          optional: mutates an input; `mutation.py` has two implementations
    INSTRUMENTED    optional: prefixes of modules whose coverage guides atheris (default: "nanospec")

`make fuzz` runs the targets with atheris, a coverage-guided fuzzer (`__main__.py`). `make test-long` runs
seeds and random mutants without it (`test_targets.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import NamedTuple

from .mutation import mutate_bytes

NAMES = sorted(file.stem.removeprefix("target_") for file in Path(__file__).parent.glob("target_*.py"))


class Target(NamedTuple):
    """A fuzz target; see the module docstring."""

    seeds: list[bytes]
    one: Callable[[bytes], object]
    mutate: Callable[[bytes, Random], bytes]


def load(name: str) -> Target:
    """Return a target by name. Its module is imported here, so that atheris can instrument it."""
    module = import_module(f"{__name__}.target_{name}")
    return Target(module.SEEDS, module.one, getattr(module, "mutate", mutate_bytes))
