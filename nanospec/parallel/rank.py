"""The process of a rank: `python -m nanospec.parallel.rank`, as `launch.py` starts it."""

from __future__ import annotations

import json
import os
import sys

from .launch import VARIABLE, Place, serve

if __name__ == "__main__":
    sys.exit(serve(Place(*json.loads(os.environ.pop(VARIABLE)))))
