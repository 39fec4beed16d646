#!/usr/bin/env python3
"""Run the command line from a checkout: `python run.py ...` is equivalent to `nanospec ...`."""

import sys

from nanospec.__main__ import command

if __name__ == "__main__":
    try:
        command()
    except ModuleNotFoundError as error:
        from nanospec.apps.cli.main import NEEDED

        if error.name not in NEEDED:
            raise
        sys.exit(f"{error}. Install the dependencies with `make run`, then activate: . .venv/bin/activate")
