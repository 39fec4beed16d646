"""Fuzz tests: every input must give a correct result or a clear error message.

files.py         targets that read files: configs, weights, drafters, tokenizers and chat templates, GGUF
requests.py      targets that read requests: bodies, response formats
mutation.py      mutations of bytes, of JSON, and of folders of files
errors.py        checks of error messages
__main__.py      `make fuzz`: runs the targets with atheris, a coverage-guided fuzzer
test_targets.py  `make test-long`: runs seeds and random mutants without atheris
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import NamedTuple

from .mutation import mutate_bytes

MODULES = {
    "files": ("config", "weights", "drafters", "tokenizer", "gguf"),
    "requests": ("bodies", "schemas"),
}
NAMES = [name for names in MODULES.values() for name in names]


class Target(NamedTuple):
    """A fuzz target.

    Attributes:
        seeds: returns valid and almost valid inputs to start from.
        one: runs the code on an input and raises if there is a bug.
        mutate: mutates an input.
    """

    seeds: Callable[[], list[bytes]]
    one: Callable[[bytes], object]
    mutate: Callable[[bytes, Random], bytes] = mutate_bytes


def load(name: str) -> Target:
    """Return a target by name. Its module is imported here, so that atheris can instrument it."""
    [module] = (module for module, names in MODULES.items() if name in names)
    target: Target = import_module(f"{__name__}.{module}").TARGETS[name]
    return target
