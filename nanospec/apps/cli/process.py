"""The command line as a process, and how it ends when it is told to, at whatever moment.

Ctrl-C becomes a sentence (`main.py`). SIGTERM, and SIGHUP, which comes of a terminal that is closed, leave
through every `with`, so that nothing stays behind: no temporary file, compiler or rank. A second one ends the
process at once, and so does each of them while Python ends.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def command() -> NoReturn:
    """Run the process's command line, and end it."""
    status: int | None = INTERRUPTED
    try:
        _on((signal.SIGTERM, signal.SIGHUP), _leave)
        from .main import main  # here, where Ctrl-C may come

        status = main()
    except KeyboardInterrupt:  # while `main` is imported, or again while it ends
        pass
    finally:
        _on((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    sys.exit(status)


def _leave(number: int, frame: object) -> NoReturn:
    _on((number,), signal.SIG_DFL)
    sys.exit(128 + number)


def _on(numbers: tuple[int, ...], action: object) -> None:
    """What these signals do from now on, but those that whoever started the process has it ignore, as nohup
    does."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, action)  # type: ignore[arg-type]
