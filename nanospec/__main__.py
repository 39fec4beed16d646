"""The entry point of `nanospec`, `python -m nanospec` and `python run.py`, with its signal handling.

Ctrl-C prints a short message (`apps/cli/main.py`). SIGTERM and SIGHUP (the terminal was closed) exit through
all `with` blocks, so that no temporary file, compiler or rank process is left over. A second signal of the
same kind, or any of these signals while Python shuts down, terminates the process immediately.
"""

import signal
import sys
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def command() -> NoReturn:
    """Run the command line and exit with its status."""
    status: int | None = INTERRUPTED
    try:
        _handle((signal.SIGTERM, signal.SIGHUP), _leave)
        from .apps.cli.main import main  # imported here so that Ctrl-C during the import is handled

        status = main(sys.argv[1:])
    except KeyboardInterrupt:  # during the import of `main`, or a second one while it exits
        pass
    finally:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C at this moment
            _handle((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    sys.exit(status)


def _leave(number: int, frame: object) -> NoReturn:
    _handle((number,), signal.SIG_DFL)
    sys.exit(128 + number)


def _handle(numbers: tuple[int, ...], action: object) -> None:
    """Set the handler of each signal, except for signals that the parent process ignores (nohup)."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, action)  # type: ignore[arg-type]


if __name__ == "__main__":
    command()
