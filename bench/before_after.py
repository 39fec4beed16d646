"""Compare two checkouts: speed, startup time, and whether outputs are bitwise identical.

    python bench/before_after.py BEFORE AFTER [--rounds 5] [--prompts 16] [--max-tokens 32] [--out FOLDER]

BEFORE and AFTER are folders of checkouts, also old ones: only public names of `nanospec` are used. In each
round, each checkout loads SmolLM2-135M in two new processes (`peers/worker.py`), plain and with n-gram
lookup, and runs batches of 1, 4 and 16 requests, greedy and seeded. The checkouts alternate batch by batch,
since the speed of a shared machine drifts within seconds; processes that are not asked sleep. The ratio of a
round is the median of AFTER / BEFORE over its turns; medians and ranges over the rounds are reported. The
exit status is 1 if an output differs between the checkouts or between n-gram and plain. Requires an otherwise
idle machine.
"""

import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from bench.cpu import System

Json = dict[str, Any]
LEAST = 0.98  # a speed ratio below this is reported as slower
TURNS = 4  # minimum number of turns per case and round
WAYS = {"plain": None, "n-gram": "auto"}  # speculation settings
MODES: dict[str, Json] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95}}
CASES = [*product(WAYS, MODES, (1, 4, 16))]
CHAT = (  # the model's chat template, so that checkouts need no method for it
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def run_round(folders: list[Path], model: Path, prompts: list[str], max_tokens: int) -> list[Json]:
    """Return for each folder its startup times, and by case its seconds and outputs, which are lists with one
    item per turn. The folders alternate in running first."""
    work = {"model": str(model), "max_num_seqs": 16, "max_model_len": 1024}
    sides = [
        {way: System(("nanospec", setting), work, folder) for way, setting in WAYS.items()}
        for folder in folders
    ]
    found: list[Json] = [
        {"start": {way: s.about["start_seconds"] for way, s in side.items()}, "seconds": {}, "outputs": {}}
        for side in sides
    ]
    for way, mode, batch in CASES:
        name, starts = f"{way}, {mode}, B={batch}", range(0, len(prompts), batch)
        for turn in range(max(TURNS, len(starts))):
            first = starts[turn % len(starts)]
            case = {"name": name, "batch": batch, "seed": first, "max_tokens": max_tokens, **MODES[mode]}
            for side, own in list(zip(sides, found))[:: -1 if turn % 2 else 1]:
                answer = side[way].ask({**case, "prompts": prompts[first : first + batch]})
                for what in ("seconds", "outputs"):
                    own[what].setdefault(name, []).append(answer[what])
    for side in sides:
        for system in side.values():
            system.close()
    return found


def compare(rounds: list[tuple[Json, Json]]) -> Json:
    """Return a row for each case and startup, from the (before, after) pairs of all rounds."""
    table: Json = {}
    for way in rounds[0][0]["start"]:
        seconds = [[side["start"][way] for side in pair] for pair in rounds]
        table[f"start, {way}"] = row(seconds, [after / before for before, after in seconds], "less")
    for name in rounds[0][0]["seconds"]:
        outputs = [side["outputs"] for pair in rounds for side in pair]
        plain = outputs[0][name.replace("n-gram", "plain")]
        tokens = sum(len(ids) for turn in plain for ids in turn)
        rates = [[tokens / sum(side["seconds"][name]) for side in pair] for pair in rounds]
        turns = (zip(*(side["seconds"][name] for side in pair)) for pair in rounds)
        ratios = [statistics.median(b / a for b, a in pairs) for pairs in turns]
        same = all(found[name] == plain for found in outputs)
        table[name] = {**row(rates, ratios, "more"), "equal": same}
    return table


def row(pairs: list[list[float]], ratios: list[float], faster_is: str) -> Json:
    """Return the medians of both sides and the spread of the ratios."""
    before, after = (round(statistics.median(side), 2) for side in zip(*pairs))
    return {"before": before, "after": after, "faster_is": faster_is, "ratio": common.spread(ratios)}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, rounds=5, prompts=16, max_tokens=32)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", type=Path, default=common.ROOT / "weights" / "smollm2-135m-instruct")
    args = parser.parse_args(argv)
    n = -(-args.prompts // 3)
    kinds = zip(common.code_edits(n), common.quotations(n), common.spec_bench(n, "chat"))
    prompts = [CHAT.format(text[:1200]) for three in kinds for text in three][: args.prompts]
    folders, rounds = [args.before.resolve(), args.after.resolve()], []
    for i in range(args.rounds):
        turn = -1 if i % 2 else 1  # reverse the order every other round
        before, after = run_round(folders[::turn], args.model.resolve(), prompts, args.max_tokens)[::turn]
        rounds.append((before, after))
        print(f"round {i + 1} of {args.rounds} done", flush=True)
    table = compare(rounds)
    for name, found in table.items():
        low, middle, high = (found["ratio"][key] for key in ("min", "median", "max"))
        slower = "  SLOWER" * (found["faster_is"] == "more" and middle < LEAST)
        differ = "" if found.get("equal", True) else "  OUTPUTS DIFFER"
        ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"{name:24} {found['before']:8} {found['after']:8}  {ratio}{slower}{differ}")
    settings = {name: getattr(args, name) for name in ("rounds", "prompts", "max_tokens")}
    settings["commits"] = list(map(common.commit, folders))
    result = {"machine": common.environment(), "settings": settings, "table": table}
    common.save("before_after", result, args.out)
    if not all(found.get("equal", True) for found in table.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
