"""Inputs nobody meant, by the million: each ends in a right result or in one clear sentence.

A target is a file target_NAME.py here, found by its name:

    SEEDS           list[bytes], valid and nearly valid inputs to begin with
    one(data)       runs the code on any bytes; returns, or raises what counts as a bug. `refusal.answer`
                    lets sentences pass and nothing else
    mutate(data, rng) -> bytes          optional: how one input becomes another; `mutation.py` has two ways
    INSTRUMENTED    optional tuple of prefixes of modules whose branches guide atheris, else ("nanospec",)

`make fuzz` runs them under atheris, a fuzzer guided by coverage (`__main__.py`); `make test` runs the seeds
and some drawn mutants of each without it (`test_targets.py`).
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
    """See above."""

    seeds: list[bytes]
    one: Callable[[bytes], object]
    mutate: Callable[[bytes, Random], bytes]


def load(name: str) -> Target:
    """The target of that name. Its module is imported here and not before, so that it can be instrumented."""
    module = import_module(f"{__name__}.target_{name}")
    return Target(module.SEEDS, module.one, getattr(module, "mutate", mutate_bytes))
