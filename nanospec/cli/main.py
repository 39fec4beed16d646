"""The command `nanospec`, also `python -m nanospec` and, in a checkout, `python run.py`.

The first words may name a command of `COMMANDS`, which has options of its own; without one the options
of `options.py` say what to do. What a command does not need is not imported: torch takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__

COMMANDS = {  # words -> the module whose main(argv) runs it
    "fetch": "nanospec.cli.fetch",
    "convert": "nanospec.cli.convert",
    "explain": "nanospec.cli.estimate",
    "train heads": "nanospec.training.heads",
    "train draft": "nanospec.training.draft",
}
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); returns its exit status.

    A command line that cannot be read ends the process, as argparse does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"nanospec {__version__}")
        return 0
    try:
        for name, module in COMMANDS.items():
            words = name.split()
            if argv[: len(words)] == words:
                return int(import_module(module).main(argv[len(words) :]))
        from .options import parse

        args = parse(argv)
        from .generate import run

        run(args)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, TypeError, OSError) as error:  # bad input, missing files, full disk
        from ..models.hub import program

        print(f"{program()}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0
