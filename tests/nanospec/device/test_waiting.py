"""Captured Triton steps in a running engine: the host never waits for the device, in admissions or anywhere
else, and no value of the host is frozen into a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.device import graphs, worker
from nanospec.engine.engine import Engine
from nanospec.kernels import launch
from nanospec.models.decoder import Model
from tests.drive import Job, make_engine, outcome, run, run_alone
from tests.nanospec.extras.tracing.records import check
from tests.random_weights import random_heads
from tests.tape import TapeCapture
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import NoWaiting, WaitError

JOBS = [
    Job([1, 2, 3, 1, 2] * 5, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[63])),  # two chunks
    Job([7, 5] * 4, SamplingParams(temperature=0, max_tokens=4, presence_penalty=0.1, logit_bias={5: 50})),
    Job([9, 4] * 2, SamplingParams(temperature=0.8, seed=-3, top_k=5, max_tokens=3, acceptance="exact")),
]
REGEX = {"type": "regex", "regex": "(ab|red)+-[0-9]{1,3}x"}
GUIDED = Job([1, 2, 3], SamplingParams(temperature=1, seed=1, max_tokens=12, response_format=REGEX))
SETUPS: dict[str, dict[str, Any]] = {
    "ngram-tree+draft": {"method": "ngram+draft", "tree_width": 2, "acceptance": "rejection"},
    "medusa-tree": {"method": "medusa", "tree_width": 2},
    "grammar": {"method": "ngram"},
}


def small_model(setup: str) -> Model:
    return tiny_model(num_layers=1, vocab_size=300 if setup == "grammar" else 64)


@contextmanager
def captured_engine(setup: str, **options: Any) -> Iterator[Engine]:
    """Make an engine with captured Triton kernels for two rows, for use in the `with` block."""
    with (
        launch.forced("triton"),
        mock.patch.object(graphs, "EagerCapture", TapeCapture),
        mock.patch.object(graphs, "batch_sizes", lambda largest: [largest]),
        mock.patch.object(worker, "KS", (0,)),
    ):
        target, draft = small_model(setup), small_model(setup)
        needed = {"draft_model": draft} if "draft" in setup else {}
        heads = random_heads(target, 2, vocab=40) if "medusa" in setup else None
        few = {"max_num_seqs": 2, "num_blocks": 3, "max_model_len": 48, "max_num_batched_tokens": 16}
        k, given = 1 + ("tree" in setup), {**few, **needed, **options}
        yield make_engine(target, k, spec=SETUPS[setup], heads=heads, enforce_eager=False, **given)


@pytest.mark.parametrize(
    "setup", [name if "draft" in name else pytest.param(name, marks=pytest.mark.long) for name in SETUPS]
)
def test_captured_steps_never_wait_and_freeze_no_host_values(setup: str, tmp_path: Path) -> None:
    """With admissions, chunked prompts, growth, preemption, an abort and releases."""
    guided = setup == "grammar"
    tokenizer, jobs = tiny_tokenizer(tmp_path) if guided else None, JOBS + [GUIDED] * guided
    wanted = run_alone(small_model(setup), jobs, max_model_len=48, tokenizer=tokenizer)
    with captured_engine(setup, tokenizer=tokenizer, async_scheduling=True, trace=True) as engine:
        if guided:  # steps with extensions are captured on use
            run(engine, jobs)
        assert engine.worker.graphs is not None
        replays, unchanged = engine.worker.graphs.replays, 0
        with NoWaiting((TapeCapture, "replay")) as device:
            requests = [engine.add(job.prompt, job.params) for job in jobs]
            given_up = engine.add([6] * 9, SamplingParams(temperature=0, max_tokens=20))
            while engine.has_work:
                before = device.uploads, replays.total()
                engine.step()
                unchanged += device.uploads == before[0] and replays.total() > before[1]
                if given_up in engine.scheduler.running:
                    engine.abort(given_up)
    assert engine.metrics.num_preemptions
    assert engine.metrics.spec.num_drafted
    assert unchanged > 0, "the same rows without new blocks: nothing is uploaded"
    for request, expected in zip(requests, wanted, strict=True):
        assert outcome(request).token_ids == expected.token_ids
        check(request)


def test_tape_capture_freezes_host_values() -> None:
    """Check that a `TapeCapture` detects a step that reads host values."""
    counts, rows, host = torch.zeros(3), torch.tensor([1, 2, 3]), [5.0]

    def step() -> Any:
        counts.add_(host[0])
        return rows + 1

    tape = TapeCapture(step)
    host[0], counts[:] = 7.0, 0.0
    rows.copy_(torch.tensor([4, 5, 6]))
    tape.replay()
    assert tape.result.tolist() == [5, 6, 7]  # type: ignore[attr-defined]
    assert counts.tolist() == [5.0] * 3  # the old value: frozen

    def reads() -> Any:
        return rows * int(rows[0])

    with pytest.raises(AssertionError, match="makes the host wait"):
        TapeCapture(reads)


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "if": lambda x: 1 if x.any() else 0,
    "tolist": lambda x: x.tolist(),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "list as index": lambda x: x[[0, 2]],
    "mask": lambda x: x[x > 1],
    "write by mask": lambda x: x.__setitem__(x > 1, 0),
    "where": lambda x: torch.where(x > 1),
    "repeat": lambda x: x.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x),
    "cpu": lambda x: x.cpu(),
}


def test_no_waiting_rejects_and_allows() -> None:
    x, index = torch.arange(4), torch.tensor([1, 0])
    for waits in WAITING.values():
        with NoWaiting(), pytest.raises(WaitError):
            waits(x)
    with NoWaiting():
        x[index] = x[index] + 1
        x[2].fill_(7)
        x[1:3].fill_(5)
        torch.where(x > 1, x, 0)
    assert x.tolist() == [1, 5, 5, 3]
