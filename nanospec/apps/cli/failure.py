"""What nobody expected, on the command line: one sentence for the user, and a file for who mends it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import traceback

from ... import __version__
from ...models.hub import program
from ...text.checks import shown

EXIT_FAILED = 70  # EX_SOFTWARE of sysexits.h
NEEDED = ("torch", "triton", "safetensors", "tokenizers")  # `run.py` says how they are installed
RAW = "NANOSPEC_TRACEBACK"  # in the environment: errors go on as they are, for a debugger


def report(error: BaseException) -> int:
    """Say that the program failed, and where its traceback lies; returns the exit status. Raises the error
    itself if the environment asks for it, or if something is not installed."""
    if os.environ.get(RAW) or (isinstance(error, ModuleNotFoundError) and error.name in NEEDED):
        raise error
    said = " ".join(str(error).split())
    said = f"{type(error).__name__}: {shown(said, 300)[1:-1]}" if said else type(error).__name__
    try:
        place = f"; {_written(error)} holds what a report should"
    except OSError:  # a full disk, say
        traceback.print_exception(error)
        place = ""
    print(f"{program()} failed, which it should not ({said}){place}.", file=sys.stderr)
    return EXIT_FAILED


def _written(error: BaseException) -> str:
    """The name of a new file, which its owner alone can read, with all that is known of the error."""
    handle, name = tempfile.mkstemp(prefix="nanospec-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        torch = getattr(sys.modules.get("torch"), "__version__", "not loaded")
        file.write(f"nanospec {__version__}, Python {platform.python_version()}, torch {torch}\n")
        file.write(f"{platform.platform()}\n{shlex.join(sys.argv)}\n\n")
        traceback.print_exception(error, file=file)
    return name
