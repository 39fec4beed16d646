"""Command-line options derived from settings dataclasses.

Each field becomes an option with the field's name, a parser for the field's type, and help from the docstring
of the class. If two classes share a field name, the option sets the first one (`--seed` is sampling's). An
option that is not set keeps the default of the class or of the command.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..config import EngineConfig, SamplingParams, SpecConfig
from ..text.validation import shown
from .json_input import strict_json
from .serve.settings import ServeConfig

SETTINGS: tuple[tuple[Any, str], ...] = (  # settings classes with their titles, in order of precedence
    (SpecConfig, "speculation"),
    (SamplingParams, "sampling (defaults for all requests)"),
    (EngineConfig, "engine"),
)
FLAGS = {"method": "--spec"}  # options that are not named after their fields
COMMON = {  # shown by --help; --help-all shows every option
    "method", "num_speculative_tokens", "draft_model", "quantization", "tensor_parallel_size", "temperature",
    "max_tokens", "seed",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations. An error prints one sentence and exits with status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=", 1)[0]
            if not name.startswith("-"):
                self.error(f"unexpected argument {shown(unknown[0])}; quote values that contain spaces")
            self.error(f"unknown option {name}{did_you_mean(name, self._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} See --help.\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name that starts with `word`, else for the closest match."""
    names = [name for name in known if name != word]
    longer = sorted((name for name in names if word.strip("-") and name.startswith(word)), key=len)
    close = longer or (get_close_matches(word, names) if word.strip("-") else [])
    return f"; did you mean {close[0]}?" if close else ""


def flag_of(name: str) -> str:
    """Return the command-line option of a field."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def in_flags(message: str, settings: Iterable[Any] = (*dict(SETTINGS), ServeConfig)) -> str:
    """Replace field names in a message with their options: max_model_len becomes --max-model-len."""

    def flag(match: re.Match[str]) -> str:
        name, equals = match.groups()
        return flag_of(name) + (" " if equals else "") if equals or "_" in name else match[0]

    pattern = r"\b(?:SpecConfig|SamplingParams|EngineConfig)\(([^()]*)\)"
    message = re.sub(pattern, lambda match: in_flags(match[1]), message)
    names = {field.name for each in settings for field in fields(each)}
    longest_first = "|".join(sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![-/.\w])({longest_first})\b(?![-/]|\.\w)(=?)", flag, message)  # no parts of paths


def typed(read: Callable[[str], Any], expected: str, metavar: str) -> dict[str, Any]:
    """Return the argparse arguments of an option parsed by `read`. If that raises ValueError, the message
    names what is `expected`, or, if that is "", repeats the error after its "name="."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            message = f"{shown(text)} must be {expected}" if expected else str(error).partition("=")[2]
            raise argparse.ArgumentTypeError(message) from None

    return {"type": parse, "metavar": metavar}


NUMBER = typed(int, "an integer", "N")
FILE = typed(lambda path: Path(path).read_text(encoding="utf-8"), "a UTF-8 text file", "FILE")
OBJECT = typed(lambda text: strict_json(text.encode()), "a JSON object", "JSON")
READ_AS: tuple[tuple[str, dict[str, Any]], ...] = (  # substring of a field's type -> argparse arguments
    ("bool", {"action": argparse.BooleanOptionalAction}),
    ("auto", typed(lambda text: text if text == "auto" else int(text), "an integer or 'auto'", "N|auto")),
    ("Mapping", OBJECT),
    ("dict", OBJECT),
    ("Sequence[int] | None", FILE),
    ("Sequence[str]", {"action": "append", "metavar": "TEXT"}),
    ("Sequence[int]", typed(lambda text: [*map(int, text.split(","))], "comma-separated integers", "N,N")),
    ("int | None", typed(lambda text: None if text == "none" else int(text), "an integer", "N")),
    ("int", NUMBER),
    ("float", typed(float, "a number", "X")),
    ("", {"metavar": "TEXT"}),
)


def descriptions(settings: type) -> dict[str, str]:
    """Return the description of each field in the docstring of a settings class."""
    entries = re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", settings.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def add_settings(parser: Parser, settings: type, title: str, full: bool, defaults: Mapping[str, Any]) -> None:
    """Add the fields of a settings class as options. `defaults` override the defaults shown in the help."""
    group, help_texts = parser.add_argument_group(title), descriptions(settings)
    for field in fields(settings):
        name, flag = field.name, flag_of(field.name)
        if flag in parser._option_string_actions:
            continue
        arguments = next(arguments for kind, arguments in READ_AS if kind in str(field.type))
        if "read" in field.metadata:
            arguments = typed(field.metadata["read"], "", field.metadata["metavar"])
        default = defaults.get(name, field.default)
        text = help_texts.get(name, "").replace("`", "").replace("None", "none")
        text += "" if default in (None, MISSING, ()) else f" (default: {default})"
        dest = f"{settings.__name__}.{name}"
        action = group.add_argument(flag, dest=dest, default=argparse.SUPPRESS, **arguments)
        # Not passed as an argument, because Python 3.10 and 3.11 append a default to BooleanOptionalAction's.
        action.help = text.replace("%", "%%") if full or name in COMMON else argparse.SUPPRESS


def fields_set(args: argparse.Namespace, settings: str) -> dict[str, Any]:
    """Return the fields of a settings class that were set on the command line."""
    prefix = settings + "."
    return {name.removeprefix(prefix): v for name, v in vars(args).items() if name.startswith(prefix)}


def base_parser(full: bool, **options: Any) -> Parser:
    """Return a parser with --model and --help-all; `full` omits the hint at the latter."""
    parser = Parser(epilog="" if full else "Use --help-all to show every option.", **options)
    parser.add_argument("--help-all", action="help", help="show every option and exit")
    model = "local folder or GGUF file, fetched model, or Hugging Face Hub id"
    parser.add_argument("--model", default="smollm2-135m-instruct", help=model)
    return parser
