"""Test clock jumps. Clocks are used for statistics and step costs only; outputs do not depend on them."""

from __future__ import annotations

import itertools
import time

import pytest

from campaigns.faults.engines import JOBS, assert_sound, reference, small_engine, small_model
from tests.drive import finish

DAY = 86_400.0


@pytest.mark.parametrize("jump", [DAY, 0.0], ids=["jump", "stand-still"])
@pytest.mark.parametrize("mode", ["plain", "as-on-gpu"])
def test_clock_jumps(mode: str, jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock may be set back; the monotonic clock may jump forward (suspend) or stand still."""
    model = small_model()
    expected = reference(model)
    counter, wall, calls = time.perf_counter, time.time, itertools.count()
    still = counter() + DAY

    def jumping() -> float:
        n = next(calls)
        return counter() + jump * (n // 50) if jump else still

    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", jumping)
        patch.setattr(time, "monotonic", jumping)
        patch.setattr(time, "time", lambda: wall() - jump * (next(calls) // 50))
        engine = small_engine(model, mode, "auto", trace=True)  # type: ignore[arg-type]
        for _ in range(2):
            requests = [engine.add(job.prompt, job.params) for job in JOBS]
            finish(engine)
            assert [request.output_ids for request in requests] == expected
            for done in (request.completion() for request in requests):
                assert min(done.seconds, done.first_token_seconds) >= 0
        assert_sound(engine)
    assert engine.policy.costs is not None
    assert engine.policy.costs.cost(2, 4) > 0
