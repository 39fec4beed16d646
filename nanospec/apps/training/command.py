"""What the command lines of the trainers share: options, the stages before training, errors as sentences."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ... import LLM, SpecConfig
from ...models.config import ModelConfig
from ...models.decoder import Model
from ...models.hub import program
from ...text.checks import check_number
from ..cli.parser import Parser
from .corpus import read_prompts, write_texts
from .data import Data, cached_hidden, split
from .loop import Settings, TrainError, whole_file

WINDOW = 1024  # tokens of a conversation
S = TypeVar("S", bound=Settings)


@dataclass
class Material:
    """What a training begins with: the target, texts as `data.split` gives them, and what they took."""

    model: Model
    num_texts: int
    train: Data
    held_out: Data
    seconds: dict[str, float]


def new_parser(name: str, text: str, settings: type[Settings]) -> argparse.ArgumentParser:
    """The options that all trainers have, and those of `settings`; `--out` is missing."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(f"{program()} train {name}", description=text, formatter_class=style)
    parser.add_argument("--model", required=True, help="a folder, a name below weights/, or a hub id")
    parser.add_argument("--work", type=Path, help="for resuming; default: a hidden folder beside --out")
    parser.add_argument("--prompts", type=Path, help="JSON lines to answer; default: the model invents them")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of text to write at least")
    parser.add_argument("--max-num-seqs", type=int, default=96, help="texts written at once")
    for each in fields(settings):  # type: ignore[arg-type]
        flag, kind = f"--{each.name.replace('_', '-')}", type(each.default)
        parser.add_argument(flag, type=kind, default=each.default, help=each.metadata["help"])
    return parser


def settings_of(args: argparse.Namespace, kind: type[S]) -> S:
    """The options that are settings; ValueError for what is out of its limits."""
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind)})  # type: ignore[arg-type]


def run_command(args: argparse.Namespace, what: str, run: Callable[[argparse.Namespace], Any]) -> int:
    """Print what `run` gives as JSON; errors and interruptions become a sentence. Returns the exit code."""
    try:
        check_number("--tokens", args.tokens, 1)
        print(json.dumps(run(args)))
    except (ValueError, OSError) as error:
        print(f"Cannot train {what} for {args.model}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def prepare(args: argparse.Namespace, folder: Path, work: Path) -> Material:
    """Have the model in `folder` write texts and compute its hidden states on them, as far as `work` lacks
    them."""
    prompts = read_prompts(args.prompts) if args.prompts else None
    claim(work, folder, args.prompts, args.seed)
    window = min(WINDOW, ModelConfig.from_path(folder).max_position_embeddings)
    seconds: dict[str, float] = {}
    with timed(seconds, "text"):
        none = SpecConfig(method="none")
        llm = LLM(folder, spec=none, max_num_seqs=args.max_num_seqs, max_model_len=window)
        rounds = write_texts(llm, work / "text", args.tokens, args.seed, prompts)
        model = llm.engine.worker.model
        del llm  # and its KV cache
    with timed(seconds, "hidden"):
        train, held_out = split(rounds, cached_hidden(model, rounds, work / "hidden"))
    return Material(model, sum(map(len, rounds)), train, held_out, seconds)


def claim(work: Path, model: Path, prompts: Path | None, seed: int) -> None:
    """Note in the work folder whose it is; TrainError if it belongs to another model, prompts or seed."""
    mine = {"model": str(model.resolve()), "prompts": prompts and str(prompts.resolve()), "seed": seed}
    note = work / "work.json"
    if note.is_file():
        theirs = _noted(note)
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise TrainError(
                    f"--work {work} was begun with {name}={theirs.get(name)!r}, not {value!r}; name another "
                    "folder or delete it."
                )
        return
    work.mkdir(parents=True, exist_ok=True)
    with whole_file(note) as temporary:
        temporary.write_text(json.dumps(mine), encoding="utf-8")


def _noted(note: Path) -> dict[str, Any]:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise TrainError(f"{note} is damaged, so it is not known whose the folder is; delete it or name another.")


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note how many seconds a stage took."""
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 1)
