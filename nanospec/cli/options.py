"""The options of the command line that generates, and the settings that are made of them.

Each table maps a field of a settings class to how argparse reads it: "flag" is its name if it is not the
field's, the rest are arguments of `add_argument`. What the user does not give keeps the class's default,
unless the table has one of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from .. import __version__
from ..config import SamplingParams, SpecConfig
from ..drafters.base import method_names, registered
from ..kernels.codes import RULES
from ..models.hub import program

Table = dict[str, dict[str, Any]]

DESCRIPTION = """\
nanospec on the command line: one prompt, a chat, a batch of requests, or a demo.

    {0} --model smollm2-135m-instruct --prompt "Why is the sky blue?"
    {0} --model smollm2-135m-instruct --chat --show-drafts
    {0} --model smollm2-135m-instruct --input requests.jsonl --output results.jsonl
    {0} --demo

Other commands, each with --help:

    {0} fetch NAME                    download a model
    {0} convert FILE.gguf [FOLDER]    make a model folder of a GGUF file
    {0} explain MODEL                 estimate the time of each kernel on an H200
    {0} train heads|draft ...         train what guesses tokens for a model
"""


def auto_or_int(text: str) -> int | str:
    """A number of tokens, or "auto"."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'")
    return text if text == "auto" else int(text)


SPECULATION: Table = {  # SpecConfig; further options are those of the methods
    "tree_width": {"type": int, "metavar": "W", "help": "most continuations guessed at once (default: 1)"},
    "acceptance": {
        "choices": RULES,
        "help": "exact (default): the output is what it is without speculation; rejection: its "
        "distribution is; typical: the output changes, since tokens are accepted that are only likely "
        "enough",
    },
    "num_speculative_tokens": {
        "type": auto_or_int,
        "metavar": "K",
        "help": "most guesses per step; auto (default) chooses by measured cost and acceptance",
    },
}
SAMPLING: Table = {  # SamplingParams
    "temperature": {"type": float, "default": 0.0, "help": "0 (default) is greedy"},
    "top_p": {"type": float},
    "top_k": {"type": int},
    "min_p": {"type": float},
    "seed": {"type": int, "help": "same seed, same text"},
    "max_tokens": {"type": int, "default": 256, "help": "most new tokens (default: 256)"},
    "min_tokens": {"type": int},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end at this text; may be repeated"},
    "ignore_eos": {"action": "store_true"},
    "n": {"type": int, "help": "how many outputs per prompt"},
    "presence_penalty": {"type": float},
    "frequency_penalty": {"type": float},
    "repetition_penalty": {"type": float},
}
ENGINE: Table = {  # EngineConfig
    "dtype": {"help": "auto (default; on a CPU bfloat16 where that is fast), bfloat16, float16 or float32"},
    "device": {"help": "auto (default), cpu, cuda or cuda:N"},
    "threads": {"type": auto_or_int, "metavar": "N", "help": "threads on a CPU, or auto (default)"},
    "max_num_seqs": {"type": int, "help": "most requests at once (default: 64)"},
    "max_model_len": {"type": int, "help": "longest prompt + output in tokens"},
    "max_num_batched_tokens": {"type": int, "help": "most tokens per step; longer prompts are split"},
    "kv_cache_memory": {"type": int, "metavar": "BYTES", "help": "size of the KV cache"},
    "enable_prefix_caching": {
        "flag": "--no-prefix-caching",
        "action": "store_false",
        "help": "do not reuse the cache of equal beginnings",
    },
}


def add_options(parser: argparse.ArgumentParser, title: str, table: Table) -> None:
    """Add a group of the table's options to the parser."""
    group = parser.add_argument_group(title)
    for field, how in table.items():
        how = {"flag": "--" + field.replace("_", "-"), "default": argparse.SUPPRESS, **how}
        group.add_argument(how.pop("flag"), dest=field, **how)


def given(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """The table's fields that were given or have a default."""
    return {field: getattr(args, field) for field in table if hasattr(args, field)}


def speculation() -> Table:
    """The options of speculation: which methods there are, what each of them lets one set, and the rest."""
    methods = registered().values()
    what = "; ".join(f"{method.method}: {method.help}" for method in methods)
    table: Table = {
        "method": {
            "flag": "--spec",
            "choices": method_names(),
            "metavar": "METHOD",
            "help": f"how to guess. {what}; A+B: B where A finds nothing; none (default: ngram)",
        }
    }
    for method in methods:
        for option in method.options:
            what = f"for --spec {method.method}: {option.help}"
            table[option.name] = {"type": option.kind, "metavar": option.metavar, "help": what}
    return {**table, **SPECULATION}


def spec_config(args: argparse.Namespace) -> SpecConfig:
    """How to guess. Raises ValueError for what does not fit together."""
    asked = given(args, speculation())
    own = {field.name for field in fields(SpecConfig)}
    return SpecConfig(
        **{name: value for name, value in asked.items() if name in own},
        options={name: value for name, value in asked.items() if name not in own},
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters of requests that state none themselves."""
    return SamplingParams(**given(args, SAMPLING))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`."""
    return given(args, ENGINE)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line. One that does not say one thing to do ends the process, as argparse does."""
    parser = build_parser()
    if argv and not argv[0].startswith("-"):
        parser.error(f"there is no command {' '.join(argv[:2])!r}; --help names them")
    args = parser.parse_args(argv)
    if sum((args.prompt is not None, args.chat, bool(args.input), args.demo, args.explain)) != 1:
        parser.error("give one of --prompt TEXT, --chat, --input FILE, --demo or --explain")
    if bool(args.input) != bool(args.output):
        parser.error("--input and --output go together")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line that generates."""
    parser = argparse.ArgumentParser(
        prog=program(),
        usage="%(prog)s [--prompt TEXT | --chat | --input FILE --output FILE | --demo | --explain] [OPTIONS]",
        description=DESCRIPTION.format(program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder, the name of a fetched model, or a hub id"
    )
    parser.add_argument("--version", action="version", version=f"nanospec {__version__}")
    add = parser.add_argument_group("what to do").add_argument
    add("--prompt", metavar="TEXT", help="answer one prompt")
    add("--chat", action="store_true", help="talk with the model")
    add("--input", metavar="FILE", help='requests, a JSON object a line: {"prompt"|"messages", ...sampling}')
    add("--output", metavar="FILE", help="results, a line each; what it already holds is not done again")
    add("--demo", action="store_true", help="three requests with and without speculation")
    add("--explain", action="store_true", help="what a step costs by the number of tokens, and why")
    add("--raw", action="store_true", help="continue the text of --prompt instead of chatting about it")
    add("--system", metavar="TEXT", help="the system message of a chat")
    add("--json", action="store_true", help="print statistics as JSON on standard output")
    add("--show-drafts", action="store_true", help="colour the tokens that were guessed right (terminal)")
    add_options(parser, "speculation", speculation())
    add_options(parser, "sampling (defaults for all requests)", SAMPLING)
    add_options(parser, "engine", ENGINE)
    return parser
