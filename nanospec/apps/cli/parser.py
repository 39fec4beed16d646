"""Define the command line without a command: what to do, and the settings of `SpecConfig`, `SamplingParams`
and `EngineConfig`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from ... import __version__
from ...models import program
from ...text import shown
from ..options import NUMBER, SETTINGS, Parser, add_settings, base_parser, did_you_mean, given

DESCRIPTION = """\
nanospec on the command line: a prompt, a chat, a batch of requests, or a demo.

    {0} --prompt "Why is the sky blue?"
    {0} --chat --show-drafts
    {0} --input requests.jsonl --output results.jsonl
    {0} --demo

Other commands, as in `{0} fetch --help`:

    fetch NAME                    download a model
    convert FILE.gguf [FOLDER]    make a model folder of a GGUF file
    train ...                     train Medusa heads for a model
    serve                         answer OpenAI's requests over HTTP
"""
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}  # of sampling, on the command line


def parse(argv: Sequence[str], commands: Iterable[str] = ()) -> argparse.Namespace:
    """Parse a command line. A bad one ends the process, as in argparse."""
    parser = build_parser("--help-all" in argv)
    if argv and not argv[0].startswith("-"):
        known = [*commands, *parser._option_string_actions]
        hint = did_you_mean(argv[0], known) or "; a text to answer is given as --prompt TEXT"
        parser.error(f"there is no command {shown(argv[0])}{hint}")
    args = parser.parse_args(argv)
    for is_wrong, message in _conflicts(args):
        if is_wrong:
            parser.error(message)
    return args


def _conflicts(args: argparse.Namespace) -> Iterable[tuple[bool, str]]:
    """Return conditions that are errors, each with its message."""
    tasks = (args.prompt is not None, args.chat, bool(args.input), args.demo, args.explain)
    traces, on_ray = args.trace is not None, args.replicas is not None
    return (
        (sum(tasks) != 1, "give one, and only one, of --prompt, --chat, --input, --demo or --explain"),
        (bool(args.input) != bool(args.output), "--input and --output go together; - is the standard stream"),
        (args.output == "-" and args.json, "--output - and --json both write to standard output"),
        (args.raw and args.chat, "--raw is of no use with --chat"),
        (args.chat and given(args, "SamplingParams").get("n", 1) > 1, "--chat gives one answer: no --n"),
        (args.raw and bool(args.system), "--raw is of no use with --system"),
        (traces and args.explain, "--trace shows answers, and --explain gives none"),
        (traces and args.trace in (args.input, args.output), f"--trace {args.trace} is a file of the batch"),
        (on_ray and not args.input, "--replicas are of use to --input and to the server"),
        (on_ray and args.replicas < 1, f"--replicas {args.replicas} must be at least 1"),
        (on_ray and traces, "--trace shows the steps of one engine; leave out --replicas"),
    )


def build_parser(full: bool = False) -> Parser:
    """Return the parser. With `full` its help names every option."""
    parser = base_parser(
        full,
        prog=program(),
        usage=f"{program()} [--model MODEL] WHAT-TO-DO [OPTIONS]",
        description=DESCRIPTION.format(program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nanospec {__version__}")
    add = parser.add_argument_group("what to do").add_argument
    add("--prompt", metavar="TEXT", help="answer one prompt; -: that on standard input")
    add("--chat", action="store_true", help="talk with the model")
    add("--input", metavar="FILE", help="answer the requests of a file of JSON lines; -: standard input")
    add("--output", metavar="FILE", help="results, a line each; what it already holds is not done again")
    add("--demo", action="store_true", help="three requests with and without speculation")
    add("--explain", action="store_true", help="what a step costs by the number of tokens, and why")
    add = parser.add_argument_group("how").add_argument
    add("--replicas", **NUMBER, help="answer --input with so many engines, by Ray")
    add("--raw", action="store_true", help="continue the text of a prompt instead of chatting about it")
    add("--system", metavar="TEXT", help="the system message of chats that have none")
    add("--json", action="store_true", help="print statistics as JSON on standard output")
    add("--trace", metavar="FILE.html", help="write a page that shows each step and each guess")
    add("--show-drafts", action="store_true", help="colour the tokens that were guessed right (terminal)")
    for settings, title in SETTINGS:
        add_settings(parser, settings, title, full, DEFAULTS)
    return parser
