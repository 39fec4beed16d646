#!/usr/bin/env python3
"""The command line from a checkout: `python run.py ...` is the installed command `nanospec ...`."""

import sys

from nanospec.__main__ import command

if __name__ == "__main__":
    try:
        command()
    except ModuleNotFoundError as error:
        from nanospec.apps.cli.main import NEEDED

        if error.name not in NEEDED:
            raise
        sys.exit(f"{error}; `make run` installs what is needed into .venv, then: . .venv/bin/activate")
