"""Outputs with a schema, with and without guesses: tokens per step, and what masks take.

    python bench/structured.py [--max-tokens 80] [--prompts 12] [--out bench/results]

Facts are to be taken out of short texts as JSON of a schema, greedily, one request at a time, by one model on
a CPU. Outputs are compared; that all of them fit the schema is what the grammar is for, and is checked too.
What was forced and what was looked up are shares of the tokens of the output. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.extras.grammar.grammar import Guide
from nanospec.kernels.codes import GUESSED
from nanospec.outputs import Completion

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "profession": {"type": "string", "maxLength": 30},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "profession", "married"],
    "additionalProperties": False,
}
PEOPLE = (
    ("Anna Miller", 34, "Berlin", "carpenter"), ("Tom Okafor", 61, "Lagos", "surgeon"),
    ("Maria Silva", 27, "Porto", "baker"), ("Kenji Watanabe", 45, "Osaka", "train driver"),
    ("Lucy Brown", 19, "Leeds", "student"), ("Omar Haddad", 52, "Amman", "teacher"),
    ("Ingrid Larsen", 38, "Bergen", "marine biologist"), ("Pavel Novak", 70, "Brno", "watchmaker"),
    ("Chloe Martin", 23, "Lyon", "violinist"), ("Samuel Mensah", 49, "Accra", "electrician"),
    ("Elena Rossi", 31, "Turin", "architect"), ("John Walker", 66, "Perth", "farmer"),
)  # fmt: skip
ASK = "{0}, aged {1}, works as a {3} in {2} and is {4}. Give name, age, city, profession and married as JSON."
SYSTEMS: dict[str, dict[str, Any]] = {
    "none": {"num_speculative_tokens": 0},
    "K=4": {"num_speculative_tokens": 4},
    "K=8": {"num_speculative_tokens": 8},
    "K=16": {"num_speculative_tokens": 16},
}


@contextmanager
def counted_masks(seconds: list[float]) -> Iterator[None]:
    """Notes how long each plan takes, per mask."""
    plan = Guide.plan

    def timed(guide: Guide, *given: Any) -> Any:
        start = time.perf_counter()
        draft = plan(guide, *given)
        if new := len(draft.masks) - 1:
            seconds.append((time.perf_counter() - start) / new)
        return draft

    with mock.patch.object(Guide, "plan", timed):
        yield


def ask(llm: LLM, prompts: list[str], options: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """What a system does for all prompts."""
    asked = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, response_format=asked, **options)
    per_mask: list[float] = []
    done: list[Completion] = []
    start = time.perf_counter()
    with counted_masks(per_mask):
        for prompt in prompts:
            done += llm.chat([{"role": "user", "content": prompt}], params)[0].outputs
    seconds = time.perf_counter() - start
    tokens = sum(len(each.token_ids) for each in done)
    sources = [piece.source for each in done for piece in each.pieces]
    drafted = sum(each.stats.num_drafted for each in done)
    accepted = sum(each.stats.num_accepted for each in done)
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_step": round(tokens / sum(each.stats.num_steps for each in done), 3),
        "forced": round(sources.count(GUESSED) / tokens, 3),
        "looked_up": round(sum(source >= 0 for source in sources) / tokens, 3),
        "acceptance_rate": round(accepted / max(drafted, 1), 3),
        "ms_per_mask": round(1e3 * statistics.median(per_mask), 4) if per_mask else None,
        "complete": sum(fits(each) for each in done),
        "token_ids": [each.token_ids for each in done],
    }


def fits(done: Completion) -> bool:
    """Whether an output that was not cut has the schema's fields and types."""
    if done.finish_reason != "stop":
        return False
    found = json.loads(done.text)
    assert list(found) == SCHEMA["required"], done.text
    assert [type(value) for value in found.values()] == [str, int, str, str, bool], done.text
    return True


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=len(PEOPLE))
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    people = PEOPLE[: args.prompts]
    prompts = [ASK.format(*who, "not married" if i % 2 else "married") for i, who in enumerate(people)]
    spec = SpecConfig(method="ngram", num_speculative_tokens=16)
    llm = LLM(args.model, spec=spec, max_num_seqs=1, max_model_len=1024)
    ask(llm, prompts[:1], {}, 16)  # compiles what has to be compiled
    rows = {name: ask(llm, prompts, options, args.max_tokens) for name, options in SYSTEMS.items()}
    texts = [row.pop("token_ids") for row in rows.values()]
    result = {
        "environment": common.environment(),
        "model": args.model,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "equal": all(text == texts[0] for text in texts),
        "rows": rows,
    }
    common.save("structured", result, args.out)


if __name__ == "__main__":
    main()
