"""On a GPU, the host waits only for results that are due."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanospec import SamplingParams
from tests.drive import finish, make_engine, outcome
from tests.no_gpu import NoWaiting
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.1, logit_bias={5: 3.0}),
    SamplingParams(seed=-1, max_tokens=25),
]


@pytest.fixture
def errors_on_waiting() -> Iterator[Any]:
    """Return a function that sets PyTorch's check for synchronization. The check is off after the test."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["ngram", "draft", "ngram+draft", "dflash", "eagle3"])
def test_async_loop_never_waits(method: str, errors_on_waiting: Any) -> None:
    """Run admission, chunked prompts, cache growth, preemption, decoding and an abort. The first run compiles
    and allocates everything that persists; the second must give the same output."""
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "vocab_size": 512}
    target = tiny_model(**kinds)
    engine = make_engine(
        target, 3, spec={"method": method},
        draft_model=tiny_model(num_layers=1, **kinds) if "draft" in method else None, num_blocks=12,
        max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip

    def go() -> list[list[int]]:
        aborted = engine.add([6] * 9, PARAMS[0])
        requests = [engine.add([7 + i, 5, 3] * (3 + 9 * i), PARAMS[i % 3]) for i in range(5)]
        for _ in range(7):
            engine.step()
        engine.abort(aborted)
        finish(engine)
        return [outcome(request).token_ids for request in requests]

    expected = go()
    with NoWaiting():
        errors_on_waiting("error")
        actual = go()
    assert actual == expected
    assert engine.metrics.num_preemptions
    assert engine.worker.graphs is not None
    with pytest.raises(RuntimeError, match="synchronizing"):  # the check works
        torch.tensor([1, 2], device="cuda")
