"""Response formats for tests, and checks that outputs follow them."""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.drive import Job, random_jobs

VOCAB = 300  # slightly more than `tiny_tokenizer` has
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "boolean"},
        "b": {"enum": ["red", "green", "blue", "re"]},
        "c": {"type": "integer", "minimum": -5, "maximum": 120},
        "d": {"type": "array", "items": {"enum": ["ab", "abab", 12]}, "maxItems": 3},
        "e": {"type": "string", "maxLength": 4},
    },
    "required": ["a", "b", "c", "d", "e"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "<" item ("," item)? ">"\nitem: "ab" | "(" item ")" | /[0-9]{2,4}/'
CHOICES = ["true", "tr", "red or green", "ab", "é\n\"'\\"]


def is_valid_json(text: str) -> bool:
    result = json.loads(text)
    a, b, c, d, e = (result[key] for key in "abcde")
    kinds = type(a) is bool and type(c) is int and type(e) is str
    inside = b in ("red", "green", "blue", "re") and -5 <= c <= 120 and {*d} <= {"ab", "abab", 12}
    return list(result) == list("abcde") and kinds and inside and len(d) <= 3 and len(e) <= 4


def follows_grammar(text: str) -> bool:
    items = text.removeprefix("<").removesuffix(">").split(",")
    item = re.compile(r"(\(*)(ab|[0-9]{2,4})(\)*)")
    result = [item.fullmatch(each) for each in items]
    return len(items) <= 2 and all(m is not None and len(m[1]) == len(m[3]) for m in result)


REGEX = "(ab|red){1,4}-[0-9]+x"
FORMATS: tuple[tuple[Mapping[str, Any], Callable[[str], bool]], ...] = (
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, is_valid_json),
    ({"type": "regex", "regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    ({"type": "grammar", "grammar": GRAMMAR}, follows_grammar),
    ({"type": "choice", "choice": CHOICES}, CHOICES.__contains__),
    ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
)


def is_valid(text: str, fmt: Mapping[str, Any]) -> bool:
    return next(check for known, check in FORMATS if known == fmt)(text)


def guided_jobs(rng: random.Random, count: int) -> list[Job]:
    """Return random jobs, most with a response format."""
    jobs = []
    for job in random_jobs(rng, 270, count, max_tokens=60):
        if rng.random() < 0.7:
            fmt, _ = FORMATS[rng.choice((0, 0, 0, 1, 2, 3, 4))]
            t = rng.choice((0.0, 1.0, 5.0, 100.0))
            params = replace(job.params, response_format=fmt, min_tokens=0, temperature=t, max_tokens=60)
            job = Job(job.prompt, params)
        jobs.append(job)
    return jobs
