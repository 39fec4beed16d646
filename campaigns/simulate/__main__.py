"""`python -m campaigns.simulate`: see `command.py`."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # must be set before triton is imported

import tests.interpreted  # noqa: F401
from campaigns.simulate.command import main

if __name__ == "__main__":
    sys.exit(main())
