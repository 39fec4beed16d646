"""Decoding speed on a CPU against vLLM, transformers and llama.cpp, each in an environment of its own.

    make peers
    python bench/cpu.py [--rounds 5] [--prompts 20] [--batch 1 4 16] [--contexts 200] [--peers vllm]
                        [--kinds plain ngram] [--quick | --all] [--fresh] [--starts] [--out bench/results]

Every system runs in processes of its own, one without guessing and one with n-gram lookup, on the same
prompts. They take turns, case by case, in an order that rotates from round to round, while the others
sleep; `--fresh` starts every process anew in each round instead. Ratios are taken within a round; medians
over the rounds are reported with their range. How many tokens a peer guesses is what was fastest for it,
case by case, in a round before the first; nanospec chooses by itself.

Kinds: plain, ngram, sampled (temperature 1, seeded, EOS ignored), first (time to the first token), policy
(ours with automatic K against K = 0 in one process, 1 to 64 at once). `--starts` times starts without
compiler caches and with them. Context 200 is chat prompts of 81 to 265 tokens (code edits, function bodies,
maths); 4000 is code and a play, with answers half as long.

Nothing else should run meanwhile. Needs the evaluation text; the environments are found in `.peers`, or in
the folder that the environment variable PEERS names.
"""

from __future__ import annotations

import argparse
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
from bench.peers.plan import KINDS, SHORT, Task, cases_of, make_groups, make_work
from bench.peers.system import System, adapter
from bench.peers.texts import long_prompts, short_prompts
from nanospec.models.config import ModelConfig
from nanospec.models.hub import resolve_model
from nanospec.text.tokenizer import Tokenizer

Json = dict[str, Any]
Lane = tuple[str, Any]  # a system and what it guesses
SETTINGS = ("rounds", "prompts", "max_tokens", "batch", "contexts", "kinds", "fresh")
PEERS = ("vllm", "transformers", "llama.cpp")


def main() -> None:
    args = parse()
    folder = resolve_model(args.model).resolve()
    systems = ["nanospec", *args.peers]
    groups = make_groups(
        args.kinds, systems, args.batch, args.contexts, args.prompts, args.max_tokens,
        lambda system: int(adapter(system).LARGEST_BATCH),
    )  # fmt: skip
    settings = {"model": str(folder), "gguf": args.gguf}
    race = Race(groups, read_prompts(folder, groups), settings, args.fresh)
    result: Json = {
        "machine": common.environment(),
        "model": args.model,
        "settings": {name: getattr(args, name) for name in SETTINGS},
    }
    rounds, reads = [], []
    race.choose()
    for i in range(args.rounds):
        reads.append(read_rate())
        print(f"\nround {i + 1}", flush=True)
        rounds.append(race.round(i))
    race.close()
    result["systems"] = race.about
    result["table"] = tables.rows(rounds)
    result["policy"] = tables.policy_rows(rounds)
    result["bandwidth"] = bandwidth(folder, max(reads), result["table"])
    if args.starts:
        result["starts"] = {system: starts(system, race) for system in systems}
        print(f"\nseconds until the first answer: {result['starts']}")
    print(f"\n{tables.markdown(result['table'])}\n\nbandwidth: {result['bandwidth']}")
    for row in result["policy"]:
        print(f"automatic K over K = 0, {row['batch']} at once: {row['ratio']}, equal {row['equal']}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot:
        tables.plot(result["table"], args.out / f"{args.name}.png", args.plot)
    common.save(args.name, result, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--gguf", help="what llama.cpp runs: the original file with 4-bit weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=20, help="at least, per case of short prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[SHORT])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["vllm"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain", "ngram"])
    parser.add_argument("--quick", action="store_true", help="8 prompts: about ten minutes with vLLM")
    parser.add_argument("--all", action="store_true", help="every kind, peer, batch size and context")
    parser.add_argument("--fresh", action="store_true", help="new processes in each round")
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--plot", metavar="MESSAGE", help="draw the ratios, and say this above them")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.prompts = 8
    if args.all:
        args.batch, args.contexts, args.starts = [1, 4, 16, 64], [SHORT, 4000], True
        args.kinds, args.peers = list(KINDS), list(PEERS)
    return args


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
        self._best: dict[tuple[str, str], Any] = {}  # (system, case): the number of drafts that is fastest

    def choose(self) -> None:
        """Find the number of drafts that is fastest for each case of a system that leaves it to its user."""
        tasks = [task for group in self.groups for task in group if task.guessing]
        for system in dict.fromkeys(task.system for task in tasks):
            cases = {task.case["name"]: task for task in tasks if task.system == system}
            guesses = adapter(system).GUESSES
            self._best.update(((system, name), guesses[0]) for name in cases)
            if len(guesses) > 1:
                self._try(system, guesses, cases)

    def _try(self, system: str, guesses: Sequence[int], cases: dict[str, Task]) -> None:
        runs: dict[str, dict[int, Json]] = {name: {} for name in cases}
        for guess in guesses:
            for name, task in cases.items():
                runs[name][guess] = self._run((system, guess), task)
            if self.fresh:
                self._end({(system, guess)})
        for name, found in runs.items():
            self._best[system, name] = tables.fastest(found)
            said = ", ".join(f"K={guess} {tables.rate(run):.1f}" for guess, run in found.items())
            print(f"{system} {name}: {said} tok/s", flush=True)
        self._end({(system, guess) for guess in guesses} - set(map(self._lane, cases.values())))

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
        system = self._running.get(lane) or self.start(lane)
        self._running[lane] = system
        found = system.run([task.case["name"]])
        [run] = found.pop("runs").values()
        print(f"  {task.case['name']:24} {task.label:24} {tables.rate(run):8.1f} tok/s", flush=True)
        self.about[f"{lane[0]} {'plain' if lane[1] is None else f'K={lane[1]}'}"] = found
        return {**run, "guess": lane[1], "waves": task.case["waves"]}

    def start(self, lane: Lane, caches: Path | None = None) -> System:
        cases = cases_of(self.groups, (lane[0], lane[1] is not None))
        work = make_work(cases, self.prompts, **self.settings, guess=lane[1])
        return System(lane[0], work, caches)

    def _end(self, lanes: set[Lane]) -> None:
        for lane in lanes & self._running.keys():
            self._running.pop(lane).close()

    def close(self) -> None:
        self._end(set(self._running))


def starts(system: str, race: Race) -> dict[str, float]:
    """Seconds until the first answer, of a start without compiler caches and of one with them."""
    found = {}
    with tempfile.TemporaryDirectory() as caches:
        for name in ("without_cache", "with_cache"):
            process = race.start((system, None), Path(caches))
            found[name] = process.run([])["first_answer_seconds"]
            process.close()
    return found


def read_rate() -> float:
    """Bytes per second of reading memory, beyond any cache."""
    block, best = torch.ones(256 << 20, dtype=torch.float32), 0.0
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    return best


def bandwidth(folder: Path, rate: float, table: Sequence[Json]) -> Json:
    """How near plain decoding of one request is to reading the bf16 weights once for each token."""
    weights = ModelConfig.from_path(folder).num_parameters * 2
    share = {
        row["system"]: round(row["decode_tokens_per_second"]["median"] * weights / rate, 3)
        for row in table
        if row["case"] == f"B=1, {SHORT}" and row["way"] == "plain" and row["system"] != "llama.cpp"
    }
    return {"read_gb_per_s": round(rate / 1e9, 1), "weight_mb": round(weights / 1e6, 1), "share": share}


if __name__ == "__main__":
    main()
