"""How much faster guessing made an output: known steps, known costs, so a known answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.apps.cli.savings import faster, saved_seconds
from nanospec.drafters.costs import StepCosts
from nanospec.engine.metrics import SpecStats

PACKED = StepCosts(packed={1: 10.0, 2: 11.0, 5: 14.0, 10: 19.0})
CAPTURED = StepCosts(captured={1: {0: 10.0, 4: 14.0}, 2: {0: 11.0, 4: 19.0}})


def llm(costs: StepCosts | None, **seconds: float) -> Any:
    worker = SimpleNamespace(stages=SimpleNamespace(seconds={"prefill": 0.0, "forward": 1.0, **seconds}))
    return SimpleNamespace(engine=SimpleNamespace(policy=SimpleNamespace(costs=costs), worker=worker))


def done(tokens: int, steps: int, drafted: int) -> Any:
    """An output of `tokens` tokens in `steps` steps, all with drafts."""
    stats = SpecStats(
        num_steps=steps, num_tokens=tokens, num_drafted=drafted, num_steps_with_drafts=steps if drafted else 0
    )
    output = SimpleNamespace(stats=stats, token_ids=[0] * tokens, prompt_token_ids=[0] * 7, record=None)
    output.outputs = [output]
    return output


@pytest.mark.parametrize("costs", [PACKED, CAPTURED], ids=["packed", "captured"])
def test_one_output(costs: StepCosts) -> None:
    assert faster(llm(costs), done(40, 10, 40), 7) == pytest.approx(4 * 10 / 14)
    assert faster(llm(costs), done(10, 10, 0), 7) == 1  # what was not guessed cost nothing
    assert faster(llm(costs), done(10, 10, 40), 7) == pytest.approx(10 / 14)  # wrong guesses cost time
    assert faster(llm(None), done(40, 10, 40), 7) is None


@pytest.mark.parametrize(("plain", "ratio"), [(3.0, 1.5), (None, None)])
def test_a_traced_output_is_as_fast_as_its_page_says(plain: float | None, ratio: float | None) -> None:
    output = done(40, 10, 40)
    output.record, lane = "record", SimpleNamespace(plain_seconds=plain, seconds=2.0)
    output.trace = lambda: SimpleNamespace(lanes=[lane])
    assert faster(llm(PACKED), output, 7) == ratio


@pytest.mark.parametrize("costs", [PACKED, CAPTURED], ids=["packed", "captured"])
def test_a_batch(costs: StepCosts) -> None:
    outputs = [done(40, 10, 40), done(40, 10, 40)]
    ratio = 4 * 11 / 19  # two at once
    assert saved_seconds(llm(costs), outputs, 10, 3.0) == pytest.approx(3 * (ratio - 1))
    halved = saved_seconds(llm(costs, prefill=1.0), outputs, 10, 3.0)  # half of the time went into prompts
    assert halved == pytest.approx(1.5 * (ratio - 1))
    assert saved_seconds(llm(None), outputs, 10, 3.0) is None


def test_a_model_that_guesses_costs_its_passes() -> None:
    costs = StepCosts(packed={1: 10.0, 5: 14.0}, propose=lambda rows, passes: 2.0 * passes)
    assert faster(llm(costs), done(40, 10, 40), 7) == pytest.approx(4 * 10 / (14 + 8))
