"""Sampling parameters beyond those of `SamplingParams`, one a file: `base.py` says how.

`rows.py` applies them to the steps of the rows that ask.
"""

import importlib
import pkgutil
from functools import cache


@cache
def load_all() -> None:
    """Import every file of this folder, so that the parameters in there register themselves."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
