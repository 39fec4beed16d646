"""Which models there are, one family a file: what its `config.json` means, and how its checkpoints name and
store the weights. `base.py` is the interface. A file that is put here is found; nothing else names it."""

import importlib
import pkgutil


def load_all() -> None:
    """Import every file of this folder, so that the families in there register themselves."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
