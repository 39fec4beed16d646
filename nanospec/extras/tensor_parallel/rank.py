"""The process of a rank: `python -m nanospec.extras.tensor_parallel.rank`, as `launch.py` starts it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from .launch import VARIABLE, Place, serve
from .team import LOOK


def end_with(leader: int) -> None:
    """End this process when the leader's has, whatever this one waits for."""
    while os.getppid() == leader:
        time.sleep(LOOK)
    os._exit(1)


if __name__ == "__main__":
    place = Place(*json.loads(os.environ.pop(VARIABLE)))
    threading.Thread(target=end_with, args=(place.leader,), daemon=True, name="leader").start()
    sys.exit(serve(place))
