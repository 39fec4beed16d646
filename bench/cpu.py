"""Decoding speed on a CPU against vLLM, transformers and llama.cpp, each in an environment of its own.

    make peers
    python bench/cpu.py [--parts short sampled] [--rounds 5] [--prompts 20] [--batch 1 4] [--peers vllm]
                        [--quick | --all] [--fresh] [--out bench/results]

Every system runs in processes of its own, one without guessing and one with n-gram lookup, on the same
prompts. They take turns, case by case, in an order that rotates from round to round, while the others
sleep; `--fresh` starts every process anew in each round instead. Ratios are taken within a round; medians
over the rounds are reported with their range. What a peer guesses is what was fastest for it, case by case,
of all that its adapter lists, nothing included, before the first round; nanospec chooses by itself.

Parts, which replace themselves in the JSON that is there:
    short    chat prompts of 81 to 265 tokens (code edits, function bodies, maths), greedy, 1 to 64 at once
    sampled  the same at temperature 1, seeded, EOS ignored
    long     prompts of 4000 tokens, code and a play, 1 and 4 at once, answers half as long
    first    the time to the first token of prompts of 1000 and 4000 tokens
    starts   seconds until the first answer, without compiler caches and with them

Nothing else should run meanwhile. Needs evaluation text that is not part of the repository, in `shared/data`
inside it or beside it: `code_edits.jsonl` (lines with `instruction`, `input`, `output`), `spec_bench.jsonl`
(Spec-Bench's `question.jsonl`) and for `long` and `first` `shakespeare.txt`. The environments are found in
`.peers`, or in the folder that the environment variable PEERS names. Transformers and llama.cpp take part in
`short` and `starts` alone; `--peers` without a name measures nanospec alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common
from bench.peers import tables
from bench.peers.plan import BATCHES, PARTS, SHORT, Task, cases_of, make_groups, make_work
from bench.peers.system import System, adapter, python_of
from bench.peers.texts import long_prompts, short_prompts
from nanospec.models.config import ModelConfig
from nanospec.models.hub import resolve_model
from nanospec.models.kv_cache import zeros_on_demand
from nanospec.text.tokenizer import Tokenizer

Json = dict[str, Any]
Lane = tuple[str, Any]  # a system and what it guesses
SETTINGS = ("rounds", "prompts", "max_tokens", "batch", "fresh")
PEERS = ("vllm", "transformers", "llama.cpp")
TRIES = 2  # of which the faster counts, when the best guess is looked for


def main() -> None:
    args = parse()
    file = args.out / f"{args.name}.json"
    result: Json = json.loads(file.read_text()) if file.is_file() else {}
    for part in args.parts:
        begun = time.perf_counter()
        result[part] = {
            "machine": common.environment(),
            "settings": {"model": Path(args.model).name, **{name: getattr(args, name) for name in SETTINGS}},
            **(measure_starts(args) if part == "starts" else measure(part, args)),
            "minutes": round((time.perf_counter() - begun) / 60, 1),
        }
        print(f"\n{tables.markdown(tables.all_rows(result))}\n")
        common.save(args.name, result, args.out)  # after each part: a later one may fail


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["short"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--gguf", help="what llama.cpp runs: the original file with 4-bit weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=20, help="at least, per case of short prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["vllm"])
    parser.add_argument("--quick", action="store_true", help="--prompts 8 --batch 1 4 16")
    parser.add_argument("--all", action="store_true", help="every part and peer")
    parser.add_argument("--fresh", action="store_true", help="new processes in each round")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.batch = 8, [1, 4, 16]
    if args.all:
        args.parts, args.peers = list(PARTS), list(PEERS)
    args.systems = ["nanospec", *args.peers]
    for system in args.systems:  # before anything is measured
        python_of(system)
    return args


def measure(part: str, args: argparse.Namespace) -> Json:
    """All rounds of a part."""
    folder = resolve_model(args.model).resolve()
    groups = make_groups(
        part, args.systems, args.batch, args.prompts, args.max_tokens,
        lambda system: int(adapter(system).LARGEST_BATCH),
    )  # fmt: skip
    settings = {"model": str(folder), "gguf": args.gguf}
    race = Race(groups, read_prompts(folder, groups), settings, args.fresh)
    race.choose()
    rounds = []
    for i in range(args.rounds):
        print(f"\n{part}, round {i + 1}", flush=True)
        rounds.append(race.round(i))
    race.close()
    table = tables.rows(rounds, common.streamed_bytes(ModelConfig.from_path(folder)))
    return {"systems": race.about, "tried": race.tried, "table": table}


def measure_starts(args: argparse.Namespace) -> Json:
    """Seconds until the first answer, of a start without compiler caches and of one with them."""
    folder = resolve_model(args.model).resolve()
    work = make_work([], read_prompts(folder, []), model=str(folder), gguf=args.gguf, guess=None)
    found: Json = {}
    for system in args.systems:
        with tempfile.TemporaryDirectory() as caches:
            for name in ("without_cache", "with_cache"):
                process = System(system, work, Path(caches))
                found.setdefault(system, {})[name] = process.run([])["first_answer_seconds"]
                process.close()
        print(f"{system} starts: {found[system]}", flush=True)
    return {"seconds": found}


def read_prompts(folder: Path, groups: Sequence[Sequence[Task]]) -> dict[str, list[list[int]]]:
    """Token ids, by what cases call them."""
    tokenizer = Tokenizer(folder)

    def chat(text: str) -> list[int]:
        asked = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        return tokenizer.encode(asked, add_special_tokens=False)

    most: dict[str, int] = {str(SHORT): 1}
    for task in (task for group in groups for task in group):
        name = task.case["prompts"]
        most[name] = max(most.get(name, 0), min(task.case["batch"] * task.case["waves"], 64))
    return {
        name: short_prompts(chat, count) if name == str(SHORT)
        else long_prompts(chat, tokenizer.encode, tokenizer.decode, count, int(name))
        for name, count in most.items()
    }  # fmt: skip


class Race:
    """The processes of all systems, and whose turn it is."""

    def __init__(
        self, groups: list[list[Task]], prompts: dict[str, list[list[int]]], settings: Json, fresh: bool
    ) -> None:
        self.groups, self.prompts, self.settings, self.fresh = groups, prompts, settings, fresh
        self.about: dict[str, Json] = {}
        self._running: dict[Lane, System] = {}
        self.tried: dict[str, dict[str, float]] = {}  # system and case: tokens per second by what was guessed
        self._best: dict[tuple[str, str], Any] = {}  # (system, case): the guess that is fastest

    def choose(self) -> None:
        """Find what is fastest to guess for each case of a system that leaves it to its user."""
        tasks = [task for group in self.groups for task in group if task.guessing]
        for system in dict.fromkeys(task.system for task in tasks):
            guesses = adapter(system).GUESSES
            cases = {task.case["name"]: task for task in tasks if task.system == system}
            self._best.update(((system, name), guesses[0]) for name in cases)
            if len(guesses) > 1:
                self._try(system, guesses, cases)

    def _try(self, system: str, guesses: Sequence[Any], cases: dict[str, Task]) -> None:
        rates: dict[str, dict[Any, float]] = {name: {} for name in cases}
        for guess in guesses:
            for name, task in cases.items():
                runs = [self._run((system, guess), task) for _ in range(TRIES)]
                rates[name][guess] = max(map(tables.rate, runs))
                self._best[system, name] = max(guesses, key=lambda g: rates[name].get(g, 0.0))
            used = set() if self.fresh else {(system, None), *map(self._lane, cases.values())}
            self._end({(system, known) for known in guesses} - used)  # each takes gigabytes
        for name, found in rates.items():
            rounded = {tables.guess_name(guess): round(rate, 1) for guess, rate in found.items()}
            self.tried[f"{system} {name}"] = rounded

    def round(self, number: int) -> tables.Round:
        """Every task once, in an order that rotates."""
        tasks = [
            task for group in self.groups
            for task in group[number % len(group) :] + group[: number % len(group)]
        ]  # fmt: skip
        if not self.fresh:
            return {(task.label, task.case["name"]): self._run(self._lane(task), task) for task in tasks}
        found: tables.Round = {}
        lanes = list(dict.fromkeys(map(self._lane, tasks)))
        for lane in lanes[number % len(lanes) :] + lanes[: number % len(lanes)]:
            for task in (task for task in tasks if self._lane(task) == lane):
                found[task.label, task.case["name"]] = self._run(lane, task)
            self._end({lane})
        return found

    def _lane(self, task: Task) -> Lane:
        return task.system, self._best.get((task.system, task.case["name"])) if task.guessing else None

    def _run(self, lane: Lane, task: Task) -> Json:
        system = self._running.get(lane) or self._start(lane)
        self._running[lane] = system
        limited = task.case["name"] == f"B=1, {SHORT}" and not task.guessing and lane[0] != "llama.cpp"
        rates = [read_rate()] if limited else []  # by reading the bf16 weights
        found = system.run([task.case["name"]])
        [run] = found.pop("runs").values()
        guess = "plain" if lane[1] is None else tables.guess_name(lane[1])
        print(f"  {task.case['name']:20} {lane[0]:12} {guess:18} {tables.rate(run):8.1f} tok/s", flush=True)
        self.about[f"{lane[0]} {guess}"] = found
        more = {"read_rate": statistics.mean([*rates, read_rate()])} if limited else {}
        return {**run, **more, "guess": lane[1], "waves": task.case["waves"]}

    def _start(self, lane: Lane) -> System:
        work = make_work(cases_of(self.groups, lane[0]), self.prompts, **self.settings, guess=lane[1])
        return System(lane[0], work)

    def _end(self, lanes: set[Lane]) -> None:
        for lane in lanes & self._running.keys():
            self._running.pop(lane).close()

    def close(self) -> None:
        self._end(set(self._running))


@functools.cache
def large_block() -> torch.Tensor:
    """1 GiB: beyond any cache, on large pages, and written once, so that none is missing when it is read."""
    return zeros_on_demand((256 << 20,), torch.float32, large_pages=True).fill_(1)


def read_rate() -> float:
    """Bytes per second of reading memory with all cores, the median of a few."""
    block, rates = large_block(), []
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        rates.append(block.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


if __name__ == "__main__":
    main()
