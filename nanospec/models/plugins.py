"""Folders whose every file registers what it adds: a way of guessing, a family of models, a parameter."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache


@cache
def import_all(package: str) -> None:
    """Import every file of a package's folder."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
