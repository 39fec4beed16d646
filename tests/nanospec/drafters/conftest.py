"""Fixtures for tests of drafters and of the policy."""

from typing import Any

import pytest

from nanospec.device.graphs import StepGraphs
from nanospec.device.step import Step
from nanospec.drafters.estimates import StepCosts


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured times: a step takes 1 ms, and 0.01 ms per token; a drafter takes no time."""

    def costs(step: Step, max_k: int, graphs: StepGraphs | None, *_: Any) -> StepCosts:
        if graphs is None:
            return StepCosts(packed={1: 1.01, 101: 2.01})
        sizes = graphs.batch_sizes
        return StepCosts({B: {k: 1 + 0.01 * B * (k + 1) for k in graphs.ks_for(B)} for B in sizes})

    monkeypatch.setattr("nanospec.device.worker.step_costs", costs)
