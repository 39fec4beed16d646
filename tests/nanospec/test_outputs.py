"""Counters add up, ratios are defined before the first step, and all of it can be serialized to JSON."""

from __future__ import annotations

import json

import pytest

from nanospec.outputs import Metrics, SpecStats


def test_ratios_include_steps_without_drafts() -> None:
    stats = SpecStats()
    for drafted, accepted, emitted in ((4, 2, 3), (0, 0, 1), (4, 4, 5), (1, 0, 1)):
        stats.record(drafted, accepted, emitted, "draft" if drafted == 1 else "ngram")
    assert (stats.num_steps, stats.num_tokens) == (4, 10)
    assert (stats.num_drafted, stats.num_accepted) == (9, 6)
    assert stats.tokens_per_step == pytest.approx(10 / 4)
    assert stats.acceptance_rate == pytest.approx(6 / 9)
    assert stats.efficiency == pytest.approx(10 / 13)
    assert stats.coverage == pytest.approx(3 / 4)
    assert stats.drafted_by_position == [3, 2, 2, 2]
    assert stats.accepted_by_position == [2, 2, 1, 1]
    assert stats.by_drafter == {"ngram": [2, 8, 6], "draft": [1, 1, 0]}


def test_ratios_are_zero_without_steps() -> None:
    stats = SpecStats()
    assert stats.tokens_per_step == stats.acceptance_rate == stats.efficiency == stats.coverage == 0


def test_metrics_are_json_serializable() -> None:
    metrics = Metrics(SpecStats())
    metrics.spec.record(2, 1, 2, "ngram")
    shown = json.loads(json.dumps(metrics.to_dict()))
    assert (shown["tokens_per_step"], shown["num_aborted"]) == (2, 0)
