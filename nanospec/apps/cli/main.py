"""The command line, from its words to an exit status.

The first words may name a command of `COMMANDS`, which has options of its own; without one the options of
`options.py` say what to do. What a command does not need is not imported: torch takes seconds. What needs no
model is checked before one is loaded.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import traceback
from codecs import BOM_UTF8
from collections.abc import Sequence
from contextlib import ExitStack
from errno import ENOSPC
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...models.hub import program, resolve_model
from ...text.checks import shown

if TYPE_CHECKING:
    from ...llm import LLM

COMMANDS = {  # words -> the module whose main(argv) runs it
    "serve": "nanospec.apps.serve.command",
    "fetch": "nanospec.apps.cli.fetch",
    "convert": "nanospec.apps.cli.convert",
    "train heads": "nanospec.apps.training",
}
NEEDED = ("torch", "triton", "safetensors", "tokenizers")  # `run.py` says how they are installed
EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 70, 130, 141  # 70: EX_SOFTWARE
RAW = "NANOSPEC_TRACEBACK"  # in the environment: unexpected errors are raised, for a debugger


def main(argv: Sequence[str]) -> int:
    """Run a command line; return its exit status. If it cannot be read, end the process, as argparse does."""
    try:
        try:
            return _run(list(argv))
        finally:
            sys.stdout.flush()  # here, where it can be caught that the reader has gone
    except BrokenPipeError:  # `| head` has seen enough
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk behind standard output
        _discard_output()
        print(f"Standard output cannot be written: {error.strerror or error}.", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted{': ' if interrupt.args else ''}{interrupt}.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return _report(error)


def _run(argv: list[str]) -> int:
    from .batch_lines import LineError
    from .options import in_flags

    try:
        for name, module in COMMANDS.items():
            words = name.split()
            if argv[: len(words)] == words:
                return int(import_module(module).main(argv[len(words) :]))
        return _generate(argv)
    except (BrokenPipeError, ModuleNotFoundError):
        raise
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:  # bad input, missing files
        text = in_flags(str(error))
        if isinstance(error, LineError | OSError):  # about files, whose names may look like settings
            text = str(error)
        if isinstance(error, OSError) and error.strerror:
            if error.errno == ENOSPC and not error.filename:
                raise  # of standard output; files have names
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"{program()}: {text}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _generate(argv: list[str]) -> int:
    """Do what the options say: answer a prompt, a chat or a batch, show the demo, or explain."""
    from .options import parse, sampling_params

    args = parse(argv, COMMANDS)
    params = sampling_params(args)
    if args.prompt == "-":
        args.prompt = _standard_input()
    args.folder = resolve_model(args.model)
    with ExitStack() as files:
        batch = None
        if args.input:
            from .batch import open_batch

            batch = files.enter_context(open_batch(args, params))
            if not batch.todo and not args.json:
                print("All requests were done before; nothing has run.", file=sys.stderr)
                return 0
        announce(args.model, args.folder)
        from .generate import run

        run(args, params, batch)
    return 0


def _standard_input() -> str:
    """Return all of standard input but the end of its last line, which echo and editors add. Raises
    ValueError if it is no text."""
    from .batch_lines import MAX_LINE, opened

    with opened("-") as file:
        data = file.read(MAX_LINE + 1)
    if len(data) > MAX_LINE:
        raise ValueError(f"standard input is longer than {MAX_LINE >> 20} MB, the limit of a prompt.")
    try:
        return data.removeprefix(BOM_UTF8).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no text in UTF-8, at byte {error.start}.") from None


def announce(name: str, folder: Path) -> None:
    """On a terminal, say what is being loaded, before it takes seconds."""
    if sys.stderr.isatty():
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"Loading {name} ({size / 1e9:.2f} GB) ...", file=sys.stderr)


def announce_ranks(llm: LLM) -> None:
    """Where a model is split, say what each rank needs."""
    plans = llm.engine.worker.memory
    for rank, plan in enumerate(plans if len(plans) > 1 else ()):
        print(f"Rank {rank} takes {plan}.", file=sys.stderr)


def _discard_output() -> None:
    """Send standard output nowhere: Python would flush it again at the end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: BaseException) -> int:
    """Report an unexpected error in one sentence, with the name of a file that holds its traceback; return
    the exit status. Raises the error itself if the environment asks for it or a library is missing."""
    if os.environ.get(RAW) or (isinstance(error, ModuleNotFoundError) and error.name in NEEDED):
        raise error
    said = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    try:
        handle, name = tempfile.mkstemp(prefix="nanospec-", suffix=".log")  # that its owner alone can read
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            torch = getattr(sys.modules.get("torch"), "__version__", "not loaded")
            file.write(f"nanospec {__version__}, Python {platform.python_version()}, torch {torch}\n")
            file.write(f"{platform.platform()}\n{shlex.join(sys.argv)}\n\n")
            traceback.print_exception(error, file=file)
        place = f"; {name} holds what a report should"
    except OSError:  # a full disk, say
        traceback.print_exception(error)
        place = ""
    print(f"{program()} failed, which it should not ({shown(said, 300)[1:-1]}){place}.", file=sys.stderr)
    return EXIT_FAILED
