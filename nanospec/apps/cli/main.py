"""The command line: dispatches commands and turns errors into exit statuses.

If the first argument is one of `COMMANDS`, that command parses the others; else the options of `parser.py`
apply. Imports are deferred, because torch takes seconds to import. Everything that can be checked without a
model is checked before one is loaded. Bad input prints one sentence; other errors print a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from errno import ENOSPC
from importlib import import_module

from ...config import SamplingParams
from ...models.folders import program, resolve_model
from ...models.generation_config import default_params

COMMANDS = ("serve", "fetch")  # modules of this folder with a function `main`
NEEDED = ("torch", "triton", "safetensors", "tokenizers")  # `run.py` explains how to install them
EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str]) -> int:
    """Run a command line and return its exit status. An invalid option raises SystemExit, as in argparse."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            return _run(list(argv))
        finally:
            sys.stdout.flush()  # raises here if the reader has exited
    except BrokenPipeError:  # as with `| head`
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # standard output is a file on a full disk
        _discard_output()
        print(f"Cannot write to standard output: {error.strerror or error}.", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted{': ' if interrupt.args else ''}{interrupt}.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    from ..batch.lines import LineError
    from ..options import in_flags

    try:
        if argv and argv[0] in COMMANDS:
            return int(import_module(f"nanospec.apps.cli.{argv[0]}").main(argv[1:]))
        return _generate(argv)
    except (BrokenPipeError, ModuleNotFoundError):
        raise
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:  # bad input, missing files
        about_files = isinstance(error, LineError | OSError)  # a file name may look like a setting
        text = str(error) if about_files else in_flags(str(error))
        if isinstance(error, OSError) and error.strerror:
            if error.errno == ENOSPC and not error.filename:
                raise  # from standard output, since files have names
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"{program()}: {text}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _generate(argv: list[str]) -> int:
    """Run the mode that a command line without a command selects."""
    from ..batch.lines import open_input
    from ..batch.run import open_batch
    from ..options import fields_set
    from .parser import DEFAULTS, parse

    args = parse(argv, COMMANDS)
    sampling = {**DEFAULTS, **fields_set(args, "SamplingParams")}
    SamplingParams(**sampling)  # report errors before the model is downloaded
    if args.prompt == "-":
        with open_input("-") as file:
            args.prompt = file.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    args.folder = resolve_model(args.model)
    params = replace(default_params(args.folder), **sampling)
    with open_batch(args, params) if args.input else nullcontext() as batch:
        if batch is not None and not batch.todo:
            print("All requests already have results; nothing to do.", file=sys.stderr)
            if args.json:
                print(json.dumps({"batch": batch.statistics()}))
            return 0
        if sys.stderr.isatty():
            print(f"Loading {args.model} ...", file=sys.stderr)
        from .generate import run

        run(args, params, batch)
    return 0


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
