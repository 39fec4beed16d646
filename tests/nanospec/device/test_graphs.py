"""Captured steps: buckets, padding, uploads and timing."""

from functools import partial
from itertools import product
from unittest.mock import Mock

import torch

from nanospec import SamplingParams
from nanospec.device.graphs import MAX_STEP_TOKENS, Bucket, StepGraphs, batch_sizes
from nanospec.device.timing import dummy_rows, replay_ms
from tests.drive import Job, make_engine, run_and_compare
from tests.tiny import tiny_model


def test_bucket_for() -> None:
    """Large buckets are skipped, so K is reduced."""
    assert batch_sizes(100) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert [batch_sizes(1), batch_sizes(3), batch_sizes(64)[-2:]] == [[1], [1, 2, 3], [48, 64]]
    steps = StepGraphs(Mock(), torch.device("cpu"), 256, [3, 16])
    actual = steps.buckets()
    assert all(b.k == 0 or b.batch_size * (b.k + 1) <= MAX_STEP_TOKENS for b in actual)
    assert actual[0].batch_size * (actual[0].k + 1) == steps.max_tokens == 1024
    chosen = [steps.bucket_for(rows, 16) for rows in (1, 60, 64, 256)]
    assert chosen == [Bucket(1, 16), Bucket(64, 3), Bucket(64, 3), Bucket(256, 3)]
    assert steps.bucket_for(256, 2) == Bucket(256, 0)
    for rows, k in product((1, 2, 3, 5, 33, 100, 193, 256), range(17)):
        bucket = steps.bucket_for(rows, k)
        assert bucket in actual
        assert bucket.batch_size >= rows
        assert bucket.k <= k


def test_replay_ms_leaves_state_unchanged() -> None:
    model = tiny_model()
    engine = make_engine(model, 2, enforce_eager=False, max_num_seqs=2)
    table, captured = engine.worker.table, engine.worker.graphs
    assert captured is not None
    assert not any(stage.seconds for stage in engine.worker.stages.values())  # a capture is not a step
    before = [column.clone() for column in (table.num_tokens, table.finished, table.max_k, table.temperature)]
    steps: list[int] = []
    capture = captured.captures[Bucket(2, 2)]
    replay = capture.replay

    def spy() -> None:
        assert (table.stop_ids[:2] == -1).all()
        replay()
        steps.append(int(capture.result.report[:, 1].sum()))  # drafts of both rows

    capture.replay = spy  # type: ignore[method-assign]
    fill_rows = partial(dummy_rows, table, engine.worker.num_blocks)
    assert replay_ms(captured, Bucket(2, 2), fill_rows) > 0
    assert steps == [4] * 6
    after = (table.num_tokens, table.finished, table.max_k, table.temperature)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    run_and_compare(engine, model, [Job([1, 2, 3, 1, 2, 3], SamplingParams(temperature=0, max_tokens=9))])
