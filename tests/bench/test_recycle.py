"""Requests replayed: what drafts give on texts whose every step is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import recycle, replay
from bench.recycle import averaged, interleaved, run
from bench.replay import Text, Way
from nanospec.drafters.costs import StepCosts
from nanospec.kernels.sampling import noise
from nanospec.kernels.speculation import grow, learn
from nanospec.kernels.speculation.recycled import CODES, ID_BITS

NOTHING = [-1] * 8


def text(prompt: list[int], output: list[int], kind: str = "a", **other: Any) -> Text:
    """A request of which the target always knew the next token."""
    tokens = prompt + output
    entries = [[token, *NOTHING[1:]] for token in tokens[1:]] + [NOTHING]
    made = Text(kind, 0.0, 0, len(prompt), len(tokens), tokens, entries)
    return made._replace(**other)


def tokens_per_step(texts: list[Text], way: Way, k: int) -> float:
    return run(texts, way, k)["tokens_per_step"]["mean"]


NEW = [*range(10, 30)]


@pytest.mark.parametrize("k", [1, 4])
def test_lookup_predicts_a_text_that_repeats_itself(k: int) -> None:
    repeated = text([1, 2, 3, 4, 5] * 3, [1, 2, 3, 4, 5] * 4)
    assert tokens_per_step([repeated], Way(recycled=False), k) == k + 1
    assert tokens_per_step([repeated], Way(), k) == k + 1
    assert tokens_per_step([text([1], NEW)], Way(recycled=False), k) == 1


def test_what_was_said_before_is_found_when_it_is_kept() -> None:
    twice = [text([1, 2], NEW), text([1, 2], NEW)]  # if kept, 20 + 4 steps
    found = {start: tokens_per_step(twice, Way(lookup=False, start=start), 4) for start in recycle.STARTS}
    assert found == {"cold": 1, "prompt": 1, "warm": round(40 / 24, 3), "warm+prompt": round(40 / 24, 3)}
    quoted = [text([7, *NEW, 7], NEW)]  # the prompt's tokens are scored, too
    found = {start: tokens_per_step(quoted, Way(lookup=False, start=start), 4) for start in recycle.STARTS}
    assert found == {"cold": 1, "prompt": 5, "warm": 1, "warm+prompt": 5}


def test_a_pair_says_more_than_its_last_token() -> None:
    verse = [1, 9, 2, 3, 9, 4, 5, 9, 6, 7, 9, 8] * 2  # behind 9 comes what depends on the token before
    texts = [text([50], verse[:13]), text([50], verse[:13])]
    alone, both = (tokens_per_step(texts, Way(lookup=False, pairs=pairs), 1) for pairs in (False, True))
    assert 1 < alone < both


def drawn(temperature: float, count: int = 80) -> Text:
    """Of two tokens, equally likely each time, the target draws by the noise, or takes the first."""
    first, tokens, entries = 10, [1, 2], [NOTHING]
    for position in range(2, count):
        pair = [first + 2 * position, first + 2 * position + 1]
        kept = [token | round(math.log(2) * CODES) << ID_BITS for token in pair]
        entries.append(kept + NOTHING[2:])
        won = int(noise.naive(4, position, torch.tensor(pair)).argmin()) if temperature else 0
        tokens.append(pair[won])
    return Text("a", temperature, 4, 2, len(tokens), tokens, [*entries, NOTHING])


def test_noise_tells_what_a_sampling_target_draws_and_greedy_ones_nothing() -> None:
    for temperature, differ in ((0.0, False), (1.0, True)):
        twice = [drawn(temperature)] * 2
        ways = [Way(lookup=False, noise=noise) for noise in (True, False)]
        known, unknown = (tokens_per_step(twice, way, 1) for way in ways)
        assert (known > unknown + 0.1) is differ
        assert differ or known == unknown
        assert known > 1.3  # all of the second are right: 2 tokens per step, and 4/3 of both


@pytest.mark.parametrize("costs", [recycle.COSTS["AVX2"], recycle.COSTS["H200, Qwen3-8B, recorded"]])
def test_speed_is_tokens_over_the_time_of_steps(costs: StepCosts) -> None:
    repeated = [text([1, 2, 3, 4, 5] * 3, [1, 2, 3, 4, 5] * 40)]
    found = run(repeated, Way(), 16, costs)
    assert 1 < found["speed"]["a"] < found["tokens_per_step"]["a"]
    assert found["speed"]["a"] == found["slowest_request"]
    dear = StepCosts(packed={1: 1.0, 2: 100.0})
    found = run([text([1, 2], [*range(10, 200)])], Way(), 16, dear)
    assert (found["speed"]["a"], found["tokens_per_step"]["a"], found["behind"]) == (1, 1, 0)


def test_kinds_take_turns_and_count_alike() -> None:
    a, b = text([1], NEW), text([2], NEW, kind="b")
    assert [t.kind for t in interleaved([a, a, a, b])] == ["a", "b", "a", "a"]
    assert averaged({"a": 1.0, "b": 2.0}) == {"a": 1.0, "b": 2.0, "mean": 1.5}


def test_numbers_are_changed_where_grow_reads_them() -> None:
    """As they are, PyTorch and C++ agree; with others the same texts take another time."""
    said = drawn(1.0, 20)
    texts, costs = [said, text([1, 2, 3] * 3, [1, 2, 4, 1, 2, 3] * 2), said], recycle.COSTS["AVX2"]
    rows = {row["numbers"]: row for row in recycle.alternatives(texts) if row["costs"] == "AVX2"}
    native = run(texts, Way(), 8, costs)
    assert {name: rows["as they are"][name] for name in native} == native
    assert len({row["speed"]["a"] for row in rows.values()}) >= len(rows) - 1
    assert run(texts, Way(grow=grow.naive), 8, costs) == native  # nothing stays changed


def test_texts_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [drawn(1.0), text([1, 2], NEW)]
    monkeypatch.setattr(replay, "collect", lambda prompts, max_tokens: made)
    assert replay.load(tmp_path / "texts", 1, 1) == made
    monkeypatch.delattr(replay, "collect")
    assert replay.load(tmp_path / "texts", 1, 1) == made


def test_entries_are_what_a_step_would_keep() -> None:
    logits = torch.full((2, 20), -100.0)
    logits[0, [5, 3]] = torch.tensor([0.6, 0.4]).log()
    logits[1] = float("nan")
    entries = learn.entries_of(logits).tolist()
    assert entries[0][:2] == [5 | 8 << ID_BITS, 3 | 15 << ID_BITS]
    assert entries[1] == NOTHING
