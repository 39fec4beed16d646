"""What guesses, one method a file; `base.py` is the interface, `loading.py` makes what is asked for."""

import importlib
import pkgutil


def load_all() -> None:
    """Import every file of this folder, so that the methods in there register themselves."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
