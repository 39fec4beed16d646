"""Which cases the comparison on a CPU runs, on which systems, and the file of work that they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]

ADAPTERS = {
    "nanospec": "nanospec_cpu", "vllm": "vllm_cpu", "transformers": "hf", "llama.cpp": "llama_cpp"
}  # fmt: skip
PARTS = ("short", "sampled", "long", "first", "starts")
BATCHES = (1, 4, 16, 64)
SHORT, LONG = 200, 4000  # tokens of context, about
THOROUGH = ("nanospec", "vllm")  # the others take part where prompts are short and answers greedy
LONG_BATCH, LONG_WAVES = 4, {1: 2}  # reading the prompts of 16 takes more than a minute
FIRST = (1000, 4000)  # tokens before the first token that is timed
GREEDY: Json = {"temperature": 0.0}
SAMPLED: Json = {"temperature": 1.0, "seed": 7, "ignore_eos": True}


class Task(NamedTuple):
    """A case for one system, with guessing on or off."""

    system: str
    guessing: bool
    case: Json

    @property
    def label(self) -> str:
        return f"{self.system} {'n-gram' if self.guessing else 'plain'}"


def make_case(name: str, prompts: int, batch: int, waves: int, max_tokens: int, **more: Any) -> Json:
    """As `worker.py` reads it."""
    return {
        "name": name, "prompts": str(prompts), "batch": batch, "waves": waves, "max_tokens": max_tokens,
        **more,
    }  # fmt: skip


def make_groups(
    part: str, systems: Sequence[str], batches: Sequence[int], prompts: int, max_tokens: int,
    largest: Callable[[str], int],
) -> list[list[Task]]:  # fmt: skip
    """Tasks to be held against each other, which follow one another. `largest`: a system's largest batch."""
    cases: list[Json] = []
    if part == "first":
        cases = [make_case(f"first token, {n}", n, 1, 4, 1, **GREEDY) for n in FIRST]
    for batch in batches:
        name, waves = f"B={batch}, {LONG if part == 'long' else SHORT}", -(-prompts // batch)
        if part == "short":
            cases.append(make_case(name, SHORT, batch, waves, max_tokens, **GREEDY, first=batch == 1))
        elif part == "sampled":
            cases.append(make_case(f"{name}, sampled", SHORT, batch, waves, max_tokens, **SAMPLED))
        elif part == "long" and batch <= LONG_BATCH:
            waves = LONG_WAVES.get(batch, 1)
            cases.append(make_case(name, LONG, batch, waves, max_tokens // 2, **GREEDY, first=True))
    takes_part = [s for s in systems if part == "short" or s in THOROUGH]
    groups = [
        [Task(s, guessing, case) for s in takes_part if case["batch"] <= largest(s)]
        for case in cases for guessing in ((False,) if part == "first" else (False, True))
    ]  # fmt: skip
    return [group for group in groups if group]


def cases_of(groups: Sequence[Sequence[Task]], system: str) -> list[Json]:
    """What the processes of a system are to know: any of them may be asked for any case."""
    return list({t.case["name"]: t.case for group in groups for t in group if t.system == system}.values())


def make_work(cases: Sequence[Json], prompts: dict[str, list[list[int]]], **settings: Any) -> Json:
    """The file that a worker is given: its cases, their prompts, room for all of them."""
    needed = {case["prompts"] for case in cases} or {str(SHORT)}
    used = {name: found for name, found in prompts.items() if name in needed}
    longest = {name: max(map(len, found)) for name, found in used.items()}
    lengths = [longest[case["prompts"]] + case["max_tokens"] for case in cases] or [512]
    window = -(-(max(lengths) + 32) // 512) * 512
    held = [case["batch"] * (length + 128) for case, length in zip(cases, lengths)]
    return {
        **settings,
        "cases": list(cases),
        "prompts": used,
        "warm_tokens": 8,
        "max_num_seqs": max((case["batch"] for case in cases), default=1),
        "max_model_len": window,
        "cache_tokens": max([window, *held]),
    }
