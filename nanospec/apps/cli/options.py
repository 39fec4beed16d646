"""Define the options of the command line without a command, and make settings of them.

Each field of `SpecConfig`, `SamplingParams` and `EngineConfig` is an option: its name is the field's, its
parser follows from the field's type, and its help is in the docstring of the class. The first class that has
a name gets it (`--seed` is sampling's). An option that is not given keeps the default of the class, or of
`DEFAULTS`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn

from ... import __version__
from ...config import EngineConfig, SamplingParams, SpecConfig
from ...models import program
from ...text import shown
from ..json_input import strict_json

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
SETTINGS: tuple[tuple[Any, str], ...] = (  # classes of settings with their titles; first come first
    (SpecConfig, "speculation"),
    (SamplingParams, "sampling (defaults for all requests)"),
    (EngineConfig, "engine"),
)
FLAGS = {"method": "--spec"}  # of fields that the option is not named like
SHORT = {"tensor_parallel_size": "-tp"}
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}  # of sampling, on the command line
COMMON = (  # in --help
    "method", "num_speculative_tokens", "draft_model", "temperature", "max_tokens", "seed",
    "tensor_parallel_size",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations; an error is one sentence and exit status 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=", 1)[0]
            if not name.startswith("-"):
                self.error(f"{shown(unknown[0])} belongs to no option; a text with blanks needs quotes")
            self.error(f"there is no option {name}{did_you_mean(name, self._option_string_actions)}")
        return found

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} See --help.\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return what to add to "there is no ...": the name that begins like it, or else the closest, if any."""
    names = [name for name in known if name != word]
    longer = sorted((name for name in names if word.strip("-") and name.startswith(word)), key=len)
    close = longer or (get_close_matches(word, names) if word.strip("-") else [])
    return f"; did you mean {close[0]}?" if close else ""


def flag_of(name: str) -> str:
    """Return the option of a field."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def in_flags(message: str, settings: Iterable[Any] = tuple(dict(SETTINGS))) -> str:
    """Replace the names of settings in a message by options: --max-model-len for max_model_len."""

    def flag(match: re.Match[str]) -> str:
        name, equals = match.groups()
        return flag_of(name) + (" " if equals else "") if equals or "_" in name else match[0]

    pattern = r"\b(?:SpecConfig|SamplingParams|EngineConfig)\(([^()]*)\)"
    message = re.sub(pattern, lambda match: in_flags(match[1]), message)
    names = {field.name for each in settings for field in fields(each)}
    longest_first = "|".join(sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![-/.\w])({longest_first})\b(?![-/]|\.\w)(=?)", flag, message)  # no parts of paths


def typed(read: Callable[[str], Any], wanted: str, metavar: str) -> dict[str, Any]:
    """Return argparse's arguments for an option that `read` parses. A ValueError becomes a message with what
    is `wanted`, or, if that is "", with the text behind "name=" in the error."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            said = f"{shown(text)} must be {wanted}" if wanted else str(error).partition("=")[2]
            raise argparse.ArgumentTypeError(said) from None

    return {"type": value, "metavar": metavar}


NUMBER = typed(int, "a whole number", "N")
OBJECT = typed(lambda text: strict_json(text.encode()), "a JSON object", "JSON")
READ_AS: tuple[tuple[str, dict[str, Any]], ...] = (  # part of a field's type -> arguments for argparse
    ("bool", {"action": argparse.BooleanOptionalAction}),
    ("auto", typed(lambda text: text if text == "auto" else int(text), "a whole number or 'auto'", "N|auto")),
    ("Mapping", OBJECT),
    ("dict", OBJECT),
    ("Sequence[str]", {"action": "append", "metavar": "TEXT"}),
    ("Sequence[int]", typed(lambda text: [*map(int, text.split(","))], "whole numbers with commas", "N,N")),
    ("int | None", typed(lambda text: None if text == "none" else int(text), "a whole number", "N")),
    ("int", NUMBER),
    ("float", typed(float, "a number", "X")),
    ("", {"metavar": "TEXT"}),
)


@cache
def descriptions(settings: type) -> dict[str, str]:
    """Return what the docstring of a class of settings says of each field."""
    entries = re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", settings.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def add_settings(
    parser: Parser, settings: type, title: str, full: bool, defaults: Mapping[str, Any] = DEFAULTS
) -> None:
    """Add the fields of a class of settings as options. `defaults`, where they are not those of the class,
    are told in the help."""
    group = parser.add_argument_group(title)
    for field in fields(settings):
        name, flag = field.name, flag_of(field.name)
        if flag in parser._option_string_actions:
            continue
        how = next(how for kind, how in READ_AS if kind in str(field.type))
        if "read" in field.metadata:
            how = typed(field.metadata["read"], "", field.metadata["metavar"])
        text = descriptions(settings).get(name, "").replace("`", "") + _default(field, defaults)
        text = re.sub(r"\bNone( takes|:)", "without it:", text).replace("None", "none")
        flags = (flag, SHORT[name]) if name in SHORT else (flag,)
        dest = f"{settings.__name__}.{name}"
        action = group.add_argument(*flags, dest=dest, default=argparse.SUPPRESS, **how)
        # Not as an argument: Python 3.10 and 3.11 add a default to the help of an option with a --no- form.
        action.help = text.replace("%", "%%") if full or name in COMMON else argparse.SUPPRESS


def _default(field: Field[Any], defaults: Mapping[str, Any]) -> str:
    value = defaults.get(field.name, field.default)
    return "" if value in (None, MISSING, ()) else f" (default: {value})"


def given(args: argparse.Namespace, settings: str) -> dict[str, Any]:
    """Return the fields of a class of settings that are on the command line."""
    prefix = settings + "."
    return {name.removeprefix(prefix): v for name, v in vars(args).items() if name.startswith(prefix)}


def parse(argv: Sequence[str], commands: Iterable[str] = ()) -> argparse.Namespace:
    """Parse a command line. A bad one ends the process, as in argparse."""
    parser = build_parser("--help-all" in argv)
    if argv and not argv[0].startswith("-"):
        known = [*commands, *parser._option_string_actions]
        meant = did_you_mean(argv[0], known) or "; a text to answer is given as --prompt TEXT"
        parser.error(f"there is no command {shown(argv[0])}{meant}")
    args = parser.parse_args(argv)
    for is_wrong, said in _conflicts(args):
        if is_wrong:
            parser.error(said)
    return args


def _conflicts(args: argparse.Namespace) -> Iterable[tuple[bool, str]]:
    """Return conditions that are errors, each with its message."""
    tasks = (args.prompt is not None, args.chat, bool(args.input), args.demo, args.explain)
    traces, several = args.trace is not None, args.replicas is not None
    return (
        (sum(tasks) != 1, "give one, and only one, of --prompt, --chat, --input, --demo or --explain"),
        (bool(args.input) != bool(args.output), "--input and --output go together; - is the standard stream"),
        (args.output == "-" and args.json, "--output - and --json both write to standard output"),
        (args.raw and args.chat, "--raw is of no use with --chat"),
        (args.chat and given(args, "SamplingParams").get("n", 1) > 1, "--chat gives one answer: no --n"),
        (args.raw and bool(args.system), "--raw is of no use with --system"),
        (traces and args.explain, "--trace shows answers, and --explain gives none"),
        (traces and args.trace in (args.input, args.output), f"--trace {args.trace} is a file of the batch"),
        (several and not args.input, "--replicas are of use to --input and to the server"),
        (several and args.replicas < 1, f"--replicas {args.replicas} must be at least 1"),
        (several and traces, "--trace shows the steps of one engine; leave out --replicas"),
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
        add_settings(parser, settings, title, full)
    return parser


def base_parser(full: bool, **options: Any) -> Parser:
    """Return a parser with --model and --help-all; `full`: the latter was given, and needs no hint."""
    parser = Parser(epilog="" if full else "--help-all names all options.", **options)
    parser.add_argument("--help-all", action="help", help="show every option and exit")
    model = "a folder, the name of a fetched model, or a hub id"
    parser.add_argument("--model", default="smollm2-135m-instruct", help=model)
    return parser
