"""`python -m nanospec` is the command `nanospec`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
