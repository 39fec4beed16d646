"""Test the seeds of all fuzz targets and random mutants of them, without atheris."""

from __future__ import annotations

from random import Random

import pytest

from campaigns.fuzz import NAMES, load

MUTANTS = 150


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NAMES)
def test_mutants_give_result_or_error_message(name: str) -> None:
    target, rng = load(name), Random(name)
    seeds = target.seeds()
    for seed in seeds:
        target.one(seed)
    for number in range(MUTANTS):
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data = target.mutate(data, rng)
        try:
            target.one(data)
        except BaseException as error:
            error.add_note(f"mutant {number}: {data[:2000]!r}") if hasattr(error, "add_note") else None
            raise
