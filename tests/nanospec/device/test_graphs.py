"""Sizes of captured steps."""

from itertools import product
from unittest.mock import Mock

import torch

from nanospec.device.graphs import MAX_STEP_TOKENS, Bucket, StepGraphs, batch_sizes


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
