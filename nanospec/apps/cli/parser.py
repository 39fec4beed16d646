"""Options of the command line without a command: the mode, and the fields of `SpecConfig`, `SamplingParams`
and `EngineConfig`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from ... import __version__
from ...models.folders import program
from ...models.generation_config import NAMES as MODEL_DEFAULTS
from ...text.validation import shown
from ..options import NUMBER, SETTINGS, Parser, add_settings, base_parser, did_you_mean, fields_set

DESCRIPTION = """\
Run a model on a prompt, in a chat, on a batch of requests, or in a demo.

    {0} --prompt "Why is the sky blue?"
    {0} --chat --show-drafts
    {0} --input requests.jsonl --output results.jsonl
    {0} --demo

commands (run `{0} COMMAND --help` for their options):
    fetch NAME                    download a model
    serve                         start an OpenAI-compatible server
"""
DEFAULTS: dict[str, Any] = {"max_tokens": 256}  # of sampling, on the command line


def parse(argv: Sequence[str], commands: Iterable[str] = ()) -> argparse.Namespace:
    """Parse a command line. An invalid one raises SystemExit, as in argparse."""
    parser = build_parser("--help-all" in argv)
    if argv and not argv[0].startswith("-"):
        known = [*commands, *parser._option_string_actions]
        hint = did_you_mean(argv[0], known) or "; use --prompt TEXT to answer a prompt"
        parser.error(f"unknown command {shown(argv[0])}{hint}")
    args = parser.parse_args(argv)
    for is_conflict, message in _conflicts(args):
        if is_conflict:
            parser.error(message)
    return args


def _conflicts(args: argparse.Namespace) -> Iterable[tuple[bool, str]]:
    """Return the conflicts between options: whether each is present, and its error message."""
    modes = (args.prompt is not None, args.chat, bool(args.input), args.demo)
    traces, on_ray = args.trace is not None, args.replicas is not None
    return (
        (sum(modes) != 1, "exactly one of --prompt, --chat, --input and --demo is required"),
        (bool(args.input) != bool(args.output), "--input and --output must be used together"),
        (args.output == "-" and args.json, "--output - and --json both write to standard output; use one"),
        (args.raw and args.chat, "--raw cannot be used with --chat"),
        (args.chat and fields_set(args, "SamplingParams").get("n", 1) > 1, "--n must be 1 with --chat"),
        (args.raw and bool(args.system), "--raw cannot be used with --system"),
        (traces and args.trace in (args.input, args.output), f"--trace {args.trace} is also a batch file"),
        (on_ray and not args.input, "--replicas requires --input or the serve command"),
        (on_ray and args.replicas < 1, f"--replicas {args.replicas} must be at least 1"),
        (on_ray and traces, "--trace cannot be used with --replicas; it records a single engine"),
    )


def build_parser(full: bool = False) -> Parser:
    """Return the parser. With `full`, its help lists every option."""
    parser = base_parser(
        full, prog=program(), usage=f"{program()} MODE [OPTIONS]\n       {program()} COMMAND [OPTIONS]",
        description=DESCRIPTION.format(program()), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"nanospec {__version__}")
    add = parser.add_argument_group("mode (exactly one is required)").add_argument
    add("--prompt", metavar="TEXT", help="answer a prompt; - reads it from standard input")
    add("--chat", action="store_true", help="start an interactive chat")
    add("--input", metavar="FILE", help="run a batch of requests in JSON Lines (-: stdin)")
    add("--demo", action="store_true", help="run three requests with and without speculation")
    add = parser.add_argument_group("general").add_argument
    add("--output", metavar="FILE", help="where to write or resume the results of --input (-: stdout)")
    add("--replicas", **NUMBER, help="number of engines, run with Ray (with --input)")
    add("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    add("--system", metavar="TEXT", help="system message for conversations without one")
    add("--json", action="store_true", help="print statistics as JSON to standard output")
    add("--trace", metavar="FILE.html", help="write an HTML page that shows each step and its drafts")
    add("--show-drafts", action="store_true", help="highlight accepted drafts in a terminal")
    defaults = {**DEFAULTS, **dict.fromkeys(MODEL_DEFAULTS, "the model's")}
    for settings, title in SETTINGS:
        add_settings(parser, settings, title, full, defaults)
    return parser
