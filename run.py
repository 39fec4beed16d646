#!/usr/bin/env python3
"""The command line from a checkout: `python run.py ...` is the installed command `nanospec ...`."""

import sys

from nanospec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
