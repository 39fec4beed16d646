"""The command `nanospec`, also `python -m nanospec` and, in a checkout, `python run.py`.

The first words may name a command of `COMMANDS`, which has options of its own; without one the options
of `options.py` say what to do. What a command does not need is not imported: torch takes seconds. What needs
no model is checked before one is loaded.
"""

from __future__ import annotations

import os
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from contextlib import ExitStack
from errno import ENOSPC
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...llm import LLM

COMMANDS = {  # words -> the module whose main(argv) runs it
    "serve": "nanospec.apps.serve.command",
    "fetch": "nanospec.apps.cli.fetch",
    "convert": "nanospec.apps.cli.convert",
    "train heads": "nanospec.apps.training",
}
EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); returns its exit status.

    A command line that cannot be read ends the process, as argparse does.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where it can be caught that nobody reads any more
    except BrokenPipeError:  # `| head` has seen enough
        _write_no_more()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk behind standard output
        _write_no_more()
        print(f"Standard output cannot be written: {error.strerror or error}.", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted{': ' if interrupt.args else ''}{interrupt}.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        from .failure import report

        return report(error)


def _write_no_more() -> None:
    """To standard output: Python would flush it again at the end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def prompt_from_standard_input() -> str:
    """All of it but the end of its last line, which echo and editors add. ValueError if it is no text."""
    from .batch_lines import MAX_LINE, opened

    with opened("-") as file:
        data = file.read(MAX_LINE + 1)
    if len(data) > MAX_LINE:
        raise ValueError(f"standard input is longer than {MAX_LINE >> 20} MB, the limit of a prompt.")
    try:
        return data.removeprefix(BOM_UTF8).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no text in UTF-8, at byte {error.start}.") from None


def _run(argv: list[str]) -> int:
    for name, module in COMMANDS.items():
        words = name.split()
        if argv[: len(words)] == words:
            return int(import_module(module).main(argv[len(words) :]))
    from ...models.hub import program, resolve_model
    from .batch_lines import LineError
    from .options import in_flags, parse, sampling_params

    args = parse(argv, COMMANDS)
    try:
        params = sampling_params(args)
        if args.prompt == "-":
            args.prompt = prompt_from_standard_input()
        args.folder = resolve_model(args.model)
        with ExitStack() as files:
            batch = None
            if args.input:
                from .batch import open_batch

                batch = files.enter_context(open_batch(args, params))
                if batch.is_done and not args.json:
                    print("All requests were done before.", file=sys.stderr)
                    if args.trace is not None:
                        print(f"Nothing has run, so {args.trace} is not written.", file=sys.stderr)
                    return 0
            announce(args.model, args.folder)
            from .generate import run

            run(args, params, batch)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, MemoryError) as error:  # bad input, missing files, full disk
        if isinstance(error, OSError) and error.errno == ENOSPC and not error.filename:
            raise  # of standard output; files have names
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        of_files = isinstance(error, LineError | OSError)  # whose names may look like settings
        print(f"{program()}: {text if of_files else in_flags(text)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0
