"""The command `nanospec`, `python -m nanospec` and `python run.py`: the process, and how signals end it.

Ctrl-C becomes a sentence (`apps/cli/main.py`). SIGTERM, and SIGHUP of a terminal that is closed, leave
through every `with` block, so that no temporary file, compiler or rank stays behind. A second one ends the
process at once, and so does each of them while Python ends.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def command() -> NoReturn:
    """Run the command line of this process, and end it."""
    status: int | None = INTERRUPTED
    try:
        _handle((signal.SIGTERM, signal.SIGHUP), _leave)
        from .apps.cli.main import main  # here, where Ctrl-C may come

        status = main(sys.argv[1:])
    except KeyboardInterrupt:  # while `main` is imported, or again while it ends
        pass
    finally:
        _handle((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    sys.exit(status)


def _leave(number: int, frame: object) -> NoReturn:
    _handle((number,), signal.SIG_DFL)
    sys.exit(128 + number)


def _handle(numbers: tuple[int, ...], action: object) -> None:
    """Set what these signals do, but leave those that the parent process has ignored, as nohup does."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, action)  # type: ignore[arg-type]


if __name__ == "__main__":
    command()
