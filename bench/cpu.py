"""Compare the decoding speed on a CPU with vLLM, transformers and llama.cpp, each in its own environment.

    make peers
    python bench/cpu.py [--parts short decode sampled long] [--rounds 5] [--prompts 8] [--batch 1 4 16]
                        [--peers vllm transformers llama.cpp] [--also MODEL[:int8|int4] ...]
                        [--name cpu] [--out bench/results]

Each system runs in two processes, one without speculation and one with n-gram lookup, on the same prompts.
The systems alternate after each case, in an order that rotates every round; idle processes sleep. Ratios are
computed per round; medians and ranges over the rounds are reported. For each case, a peer uses the fastest
of its speculation settings in `peers/worker.py` (including none); nanospec uses automatic K.

Parts (a run replaces the results of its parts in an existing JSON file):
    short    at least `--prompts` chat prompts of 81 to 265 tokens (code, maths) per case, greedy
    decode   only the last 24 tokens of these prompts, to measure decoding alone; EOS ignored
    sampled  the prompts of `short` at temperature 1, seeded, EOS ignored
    long     prompts of 4000 tokens (code and a play), at most 4 at once, outputs half as long

Requires an otherwise idle machine, and evaluation data that is not part of the repository, in `shared/data`
in it or next to it: `code_edits.jsonl` (lines with `instruction`, `input`, `output`), `spec_bench.jsonl`
(Spec-Bench's `question.jsonl`) and, for `long`, `shakespeare.txt`. The environments are in `.peers`, or in
the folder given by the environment variable PEERS. Transformers and llama.cpp run one request at a time and
only `short` and `decode`. `--peers` without a name measures nanospec alone. `--model` may be a GGUF file,
which llama.cpp runs too; `--also` runs nanospec with the same model in other formats, `:int8` quantizing it
while loading.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from bench.peers.worker import SPEC_SETTINGS, environment
from nanospec.models.folders import resolve_model
from nanospec.text.tokenizer import Tokenizer

Json = dict[str, Any]
Lane = tuple[str, Any]  # a system and its speculation setting, None for no speculation
FOLDERS = {"vllm": "vllm", "transformers": "hf", "llama.cpp": "llama"}
PARTS: dict[str, Json] = {
    "short": {"temperature": 0.0},
    "decode": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 1.0, "seed": 7, "ignore_eos": True},
    "long": {"temperature": 0.0},
}
SHORT, LONG = (81, 265), 4000  # prompt lengths in tokens
LENGTHS = {"short": 200, "decode": 24, "sampled": 200, "long": LONG}  # typical
TRIES = 2  # runs per speculation setting when the best is chosen; the faster one counts


# ---- prompts -------------------------------------------------------------------------------------------


def short_texts() -> list[str]:
    """Return prompts that alternate between code edits, functions to complete, and maths."""
    pairs = common.code_edit_pairs(100)
    kinds = [prompt for prompt, _ in pairs], [unfinished(answer) for _, answer in pairs]
    return list(chain(*zip(*kinds, common.spec_bench(80, "math_reasoning"))))


def unfinished(answer: str) -> str:
    """Return a prompt to complete the first half of some code."""
    lines = answer.removeprefix("```python\n").removesuffix("\n```").strip().splitlines()
    half = "\n".join(lines[: -(-len(lines) // 2)])
    return f"Complete this function, and return all of it.\n\n```python\n{half}\n```"


def long_texts(tokenizer: Tokenizer, count: int) -> list[str]:
    """Return prompts of about `LONG` tokens that alternate between code to edit and part of a play."""
    answers, room = [answer for _, answer in common.code_edit_pairs(100)], LONG - 120
    play = tokenizer.encode(common.shakespeare()[: 6 * count * LONG])
    found = []
    for i in range(count):
        code = tokenizer.encode("\n\n".join(answers[7 * i % 100 :] + answers[: 7 * i % 100]))[:room]
        passage = tokenizer.decode(play[i // 2 * room : (i // 2 + 1) * room] if i % 2 else code)
        found.append(
            f"{passage}\n\nWho speaks here, and what about? Quote some of the lines." if i % 2 else
            f"{passage}\n\nRepeat the last whole function above, with its arguments renamed."
        )  # fmt: skip
    return found


def read_prompts(tokenizer: Tokenizer, part: str, count: int) -> list[list[int]]:
    """Return `count` chat prompts of a part as token ids."""
    texts = long_texts(tokenizer, count) if part == "long" else short_texts()
    found = [common.chat_prompt(tokenizer, text) for text in texts]
    if part != "long":
        found = [prompt for prompt in found if SHORT[0] <= len(prompt) <= SHORT[1]]
    if len(found) < count:
        raise SystemExit(f"The evaluation data has {len(found)} prompts of {SHORT} tokens, not {count}.")
    return [prompt[-LENGTHS[part] if part == "decode" else 0 :] for prompt in found[:count]]


def make_cases(part: str, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Json]:
    """Return the cases of a part, in the format of `peers/worker.py`."""
    most = {"long": 4}.get(part, max(args.batch))
    batches = [batch for batch in args.batch if batch <= most]
    prompts = read_prompts(tokenizer, part, max([*batches, args.prompts if part != "long" else 2]))
    tokens, length = args.max_tokens // (1 + (part == "long")), LENGTHS[part]
    ending = ", sampled" * (part == "sampled")
    count = min(args.prompts, len(prompts))
    return [
        {"name": f"B={batch}, {length}{ending}", "prompts": prompts[: -(-count // batch) * batch],
         "batch": batch, "max_tokens": tokens, **PARTS[part]}
        for batch in batches
    ]  # fmt: skip


# ---- processes -----------------------------------------------------------------------------------------


def python_of(system: str) -> Path:
    """Return the Python interpreter of a system's environment."""
    if system == "nanospec":
        return Path(sys.executable)
    python = Path(os.environ.get("PEERS", common.ROOT / ".peers")) / FOLDERS[system] / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} not found; install {system} with: make peers PEER={FOLDERS[system]}")
    return python


def kind_of(system: str) -> str:
    """Return the program of a system, which for nanospec may be followed by a model."""
    return system.partition(" ")[0]


class System(common.Child):
    """A process of a system with one speculation setting (`peers/worker.py`); of nanospec in `checkout`."""

    def __init__(self, lane: Lane, work: Json, checkout: Path = common.ROOT) -> None:
        kind, _, model = lane[0].partition(" ")
        python, work = python_of(kind), {**work, "setting": lane[1]}
        if model:
            work["model"], _, work["quantization"] = model.partition(":")
        command = str(python), str(Path(__file__).parent / "peers/worker.py"), kind
        super().__init__(lane[0], command, Path.cwd(), environment(kind, python, checkout))
        self.about = self.ask(work)


class Race:
    """Runs the cases of a part on the processes of all systems, in turn."""

    def __init__(self, part: str, cases: list[Json], systems: Sequence[str], work: Json) -> None:
        self.cases, self.work = cases, work
        short = part in ("short", "decode")
        self.systems = [s for s in systems if short or kind_of(s) in ("nanospec", "vllm")]
        self.running: dict[Lane, System] = {}
        self.about: dict[str, Json] = {}
        self.tried: dict[str, dict[str, float]] = {}  # by system and case: tokens per second by setting
        self.best: dict[tuple[str, str], Any] = {}  # by system and case: the fastest setting

    def takes_part(self, system: str, case: Json) -> bool:
        return case["batch"] == 1 or kind_of(system) in ("nanospec", "vllm")

    def choose(self) -> None:
        """Find the fastest speculation setting of every system for every case."""
        for system in self.systems:
            settings = SPEC_SETTINGS[kind_of(system)]
            cases = [case for case in self.cases if self.takes_part(system, case)]
            for setting in settings:
                for case in cases if len(settings) > 1 else ():
                    speed = max(rate(self.run((system, setting), case)) for _ in range(TRIES))
                    tried = self.tried.setdefault(f"{system} {case['name']}", {})
                    tried[setting_name(setting)] = round(speed, 1)
                if setting is not None and len(settings) > 1:
                    self.running.pop((system, setting)).close()  # each process uses gigabytes
            for case in cases:
                speeds = self.tried.get(f"{system} {case['name']}", {})
                best = max(settings, key=lambda each: speeds.get(setting_name(each), 0.0))
                self.best[system, case["name"]] = best

    def round(self, number: int) -> dict[tuple[str, str, str], Json]:
        """Run every case on every system, with and without speculation. Keys are (system, way, case)."""
        found = {}
        for case in self.cases:
            taking = [system for system in self.systems if self.takes_part(system, case)]
            turn = number % len(taking)
            for way in ("plain", "n-gram"):
                for system in taking[turn:] + taking[:turn]:
                    setting = self.best[system, case["name"]] if way == "n-gram" else None
                    run = self.run((system, setting), case)
                    found[system, way, case["name"]] = {**run, "setting": setting}
        return found

    def run(self, lane: Lane, case: Json) -> Json:
        if lane not in self.running:
            self.running[lane] = System(lane, self.work)
        found = self.running[lane].ask(case)
        name = f"{lane[0]} {setting_name(lane[1])}"
        self.about[name] = self.running[lane].about
        print(f"  {case['name']:20} {name:28} {rate(found):8.1f} tok/s", flush=True)
        return found

    def close(self) -> None:
        for system in self.running.values():
            system.close()


# ---- the table -----------------------------------------------------------------------------------------


def rate(run: Json) -> float:
    """Return the output tokens per second, including prefill."""
    return float(sum(map(len, run["outputs"])) / run["seconds"])


def setting_name(setting: Any) -> str:
    """Return the name of a speculation setting: K, and for vLLM the n-gram lengths of the lookup."""
    if setting is None:
        return "K = 0"
    return f"K = {setting[0]}, {setting[1]}–{setting[2]}" if isinstance(setting, tuple) else f"K = {setting}"


def table(rounds: Sequence[dict[tuple[str, str, str], Json]]) -> list[Json]:
    """Return a row for each system, way and case: rates, ratios per round, equal outputs."""
    rows = []
    for system, way, case in rounds[0]:
        runs = [r[system, way, case] for r in rounds]
        row: Json = {"case": case, "system": system, "way": way}
        row["tokens_per_second"] = common.spread([rate(run) for run in runs])
        if system != "nanospec":
            ours = [rate(r["nanospec", way, case]) for r in rounds]
            row["nanospec_ratio"] = common.spread([a / rate(run) for a, run in zip(ours, runs)])
        if way != "plain":
            plain = [r[system, "plain", case] for r in rounds]
            row["setting"] = setting_name(runs[0]["setting"])
            row["plain_ratio"] = common.spread([rate(run) / rate(p) for run, p in zip(runs, plain)])
            outputs = [zip(run["outputs"], p["outputs"]) for run, p in zip(runs, plain)]
            equal = min(sum(a == b for a, b in pairs) for pairs in outputs)
            row["equal_to_plain"] = [equal, len(runs[0]["outputs"])]
        rows.append(row)
    return rows


def show(rows: Sequence[Json]) -> None:
    for row in rows:
        ratio = row.get("nanospec_ratio")
        note = "  nanospec {median:.2f}x ({min:.2f} to {max:.2f})".format(**ratio) if ratio else ""
        if "setting" in row:
            note += "  equal {} of {}, {}".format(*row["equal_to_plain"], row["setting"])
        speed = row["tokens_per_second"]["median"]
        print(f"{row['case']:18} {row['system']:12} {row['way']:7} {speed:8.1f}{note}")


def main() -> None:
    parser = common.parser(__doc__, model=common.MODEL, name="cpu", rounds=5, prompts=8, max_tokens=96)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["short"])
    parser.add_argument("--gguf", help="model file for llama.cpp (default: --model, or the original 4 bits)")
    parser.add_argument("--also", nargs="*", default=[], metavar="MODEL[:int8|int4]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--peers", nargs="*", choices=FOLDERS, default=["vllm"])
    args = parser.parse_args()
    systems = ["nanospec", *args.peers, *(f"nanospec {model}" for model in args.also)]
    for system in args.peers:
        python_of(system)  # fail before the measurement starts
    folder = resolve_model(args.model).resolve()
    tokenizer, file = Tokenizer(folder), args.out / f"{args.name}.json"
    result: Json = json.loads(file.read_text()) if file.is_file() else {}
    gguf = args.gguf or (str(Path(args.model).resolve()) if args.model.endswith(".gguf") else None)
    for part in args.parts:
        cases = make_cases(part, tokenizer, args)
        longest = max(len(prompt) + case["max_tokens"] for case in cases for prompt in case["prompts"])
        work = {"model": str(folder), "gguf": gguf, "max_num_seqs": max(case["batch"] for case in cases)}
        race = Race(part, cases, systems, {**work, "max_model_len": -(-(longest + 32) // 512) * 512})
        race.choose()
        rounds = [race.round(i) for i in range(args.rounds)]
        race.close()
        names = ("rounds", "prompts", "max_tokens", "batch")
        settings = {"model": folder.name, **{name: getattr(args, name) for name in names}}
        about = {"machine": common.environment(), "settings": settings, "systems": race.about}
        result[part] = {**about, "tried": race.tried, "table": table(rounds)}
        show(result[part]["table"])
        common.save(args.name, result, args.out)  # after each part, in case a later part fails


if __name__ == "__main__":
    main()
