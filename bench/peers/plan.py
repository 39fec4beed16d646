"""Which cases the comparison on a CPU runs, on which systems, and the file of work that they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]

ADAPTERS = {
    "nanospec": "nanospec_cpu", "vllm": "vllm_cpu", "transformers": "hf", "llama.cpp": "llama_cpp"
}  # fmt: skip
KINDS = ("plain", "ngram", "sampled", "first", "policy")
SHORT = 200  # the context of short prompts, about
LONG_WAVES = {1: 2}  # few waves of long prompts
FIRST = (1000, 4000)  # tokens before the first token that is timed
POLICY = (1, 2, 4, 8, 16, 32, 64)  # batch sizes at which automatic K is held against K = 0
GREEDY: Json = {"temperature": 0.0}
SAMPLED: Json = {"temperature": 1.0, "seed": 7, "ignore_eos": True}


class Task(NamedTuple):
    """A case for one system, with guessing on or off."""

    system: str
    guessing: bool
    case: Json

    @property
    def lane(self) -> tuple[str, bool]:
        return self.system, self.guessing

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
    kinds: Sequence[str], systems: Sequence[str], batches: Sequence[int], contexts: Sequence[int],
    prompts: int, max_tokens: int, largest: Callable[[str], int],
) -> list[list[Task]]:  # fmt: skip
    """Tasks to be held against each other, which follow one another. `largest`: a system's largest batch."""
    groups: list[list[Task]] = []

    def add(case: Json, guessing: Sequence[bool], only: Sequence[str] = systems) -> None:
        able = [system for system in systems if system in only and case["batch"] <= largest(system)]
        groups.extend([Task(system, guess, case) for system in able] for guess in guessing)

    ways = [guess for kind, guess in (("plain", False), ("ngram", True)) if kind in kinds]
    for context in contexts:
        for batch in batches:
            name, short = f"B={batch}, {context}", context == SHORT
            waves = -(-prompts // batch) if short else LONG_WAVES.get(batch, 1)
            tokens = max_tokens if short else max_tokens // 2
            first = not short or batch == 1
            add(make_case(name, context, batch, waves, tokens, **GREEDY, first=first), ways)
            if "sampled" in kinds and short:
                case = make_case(f"{name}, sampled", context, batch, waves, tokens, **SAMPLED)
                add(case, [False], ("nanospec", "vllm"))
                add(case, [True], ["nanospec"])
    for tokens in FIRST if "first" in kinds else ():
        add(make_case(f"first token, {tokens}", tokens, 1, 4, 1, **GREEDY), [False])
    for batch in POLICY if "policy" in kinds and "nanospec" in systems else ():
        groups.append(policy_tasks(batch, max(1, min(prompts, 16) // batch), max_tokens))
    return [group for group in groups if group]


def policy_tasks(batch: int, waves: int, max_tokens: int) -> list[Task]:
    """The same engine with and without guessing."""
    ways: dict[str, Json] = {"K=0": {**GREEDY, "guess": 0}, "automatic": GREEDY}
    return [
        Task("nanospec", True, make_case(f"{batch} at once, {name}", SHORT, batch, waves, max_tokens, **way))
        for name, way in ways.items()
    ]


def cases_of(groups: Sequence[Sequence[Task]], lane: tuple[str, bool]) -> list[Json]:
    """What a system's process with guessing, or without, is to know."""
    found = {task.case["name"]: task.case for group in groups for task in group if task.lane == lane}
    return list(found.values())


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
