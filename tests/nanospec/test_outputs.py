"""Counters add up, and ratios are defined before the first step."""

from typing import Any

from nanospec.outputs import Metrics, SpecStats


def test_counters_and_ratios_include_steps_without_drafts() -> None:
    metrics = Metrics(SpecStats("typical"), num_finished=3)
    for drafted, accepted, emitted in ((4, 2, 3), (0, 0, 1), (4, 4, 5), (1, 0, 1)):
        metrics.spec.record(drafted, accepted, emitted, "draft" if drafted == 1 else "ngram")
    expected: dict[str, Any] = {
        "num_steps": 4, "num_tokens": 10, "num_drafted": 9, "num_accepted": 6, "num_finished": 3,
        "tokens_per_step": 2.5, "acceptance_rate": 0.6667, "efficiency": 0.7692, "coverage": 0.75,
        "drafted_by_position": [3, 2, 2, 2], "accepted_by_position": [2, 2, 1, 1],
        "acceptance": "typical", "lossy": True,
        "by_drafter": {
            "ngram": {"num_steps": 2, "num_drafted": 8, "num_accepted": 6},
            "draft": {"num_steps": 1, "num_drafted": 1, "num_accepted": 0},
        },
    }  # fmt: skip
    assert metrics.to_dict().items() >= expected.items()
    stats, plain, drafts = SpecStats(), SpecStats(), SpecStats()
    plain.record(0, 0, 1, "ngram")
    drafts.record(1, 1, 2, "ngram")
    for each, ratios in (stats, [0, 0, 0, 0]), (plain, [1, 0, 1, 0]), (drafts, [2, 1, 1, 1]):
        assert [each.tokens_per_step, each.acceptance_rate, each.efficiency, each.coverage] == ratios
    assert not SpecStats("exact").to_dict().keys() & {"acceptance", "lossy"}
