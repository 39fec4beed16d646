"""What `bench/endurance.py` says of a few hundred requests: nothing is held, nothing of the past is kept."""

from __future__ import annotations

import pytest

from bench import endurance


@pytest.mark.long
def test_nothing_grows() -> None:
    found = endurance.run(240)
    assert found["preemptions"] > 0
    assert found["aborted"] > 0
    assert found["cached_tokens"] > 0
    assert found["days"] > 1
    assert found["object_growth"] < 200  # of 200 requests, each of which is several objects
    assert len(found["step_ms"]) == endurance.PARTS
