"""On a GPU, the host waits only for results that are due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanospec import SamplingParams
from nanospec.device.graphs import CudaCapture
from nanospec.device.messages import Admission
from nanospec.engine.engine import Engine
from nanospec.kernels.batch import Chunk
from tests.drive import finish, make_engine, outcome
from tests.random_weights import random_heads
from tests.tiny import tiny_model
from tests.waiting import NoWaiting

pytestmark = pytest.mark.gpu
PENALIZED = SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.1, logit_bias={5: 3.0})
PARAMS = [SamplingParams(temperature=0, max_tokens=60), PENALIZED, SamplingParams(seed=-1, max_tokens=25)]


def make(method: str, **options: Any) -> Engine:
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "vocab_size": 512}
    target, draft = tiny_model(**kinds), tiny_model(num_layers=1, **kinds)
    return make_engine(
        target, 3, spec={"method": method}, draft_model=draft if "draft" in method else None,
        heads=random_heads(target, 3) if method == "medusa" else None, **options,
    )  # fmt: skip


@pytest.fixture
def errors_on_waiting() -> Iterator[Any]:
    """Torch's own check for synchronization, switched off after the test."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["ngram", "draft", "ngram+draft", "medusa"])
def test_lagged_loop_never_waits(method: str, errors_on_waiting: Any) -> None:
    """Admission, chunked prompts, growth, preemption, steady state, an abort, the end. The first run compiles
    and allocates everything that persists; the second must give the same output."""
    engine = make(
        method, num_blocks=12, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )  # fmt: skip

    def go(steps_before_abort: int = 7) -> list[list[int]]:
        given_up = engine.add([6] * 9, PARAMS[0])
        requests = [engine.add([7 + i, 5, 3] * (3 + 9 * i), PARAMS[i % 3]) for i in range(5)]
        for _ in range(steps_before_abort):
            engine.step()
        engine.abort(given_up)
        finish(engine)
        return [outcome(request).token_ids for request in requests]

    expected = go()
    with NoWaiting((CudaCapture, "replay")):
        errors_on_waiting("error")
        actual = go()
    assert actual == expected
    assert engine.metrics.num_preemptions
    assert engine.worker.graphs is not None


def test_torch_check_detects_waits(errors_on_waiting: Any) -> None:
    errors_on_waiting("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.tensor([1, 2], device="cuda")


def test_admission_and_prefill_do_not_wait_for_busy_device() -> None:
    """Includes waits that torch does not detect: everything is queued while the device is busy."""
    engine = make("ngram", max_num_seqs=4, max_model_len=128)
    worker = engine.worker
    request = Admission(0, list(range(40)), 40, 100, [1, 2, 3], 0, 3, (1,), PENALIZED, 4)
    for busy in (False, True):  # the first time compiles and allocates
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(2_000_000_000)  # about a second
        start = time.perf_counter()
        worker.admit(request)
        worker.prefill([Chunk(0, 0, 39)])
        worker.release(0)
        seconds = time.perf_counter() - start
    before = time.perf_counter()
    torch.cuda.synchronize()
    assert seconds < 0.2 < time.perf_counter() - before
