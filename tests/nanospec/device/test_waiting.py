"""The host never waits for the device, in admissions or anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import nanospec.device.graphs as graphs
from nanospec import SamplingParams
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan
from nanospec.kernels import launch
from tests.drive import Job, make_engine, outcome, run, run_alone
from tests.random_weights import random_heads
from tests.tape import TapeCapture
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import NoWaiting, WaitError

JOBS = [
    Job([1, 2, 3] * 9, SamplingParams(temperature=0, max_tokens=7)),  # in two chunks
    Job([9, 4] * 3, SamplingParams(temperature=0.8, seed=-3, top_k=5, max_tokens=4)),
    Job([7, 5, 5], SamplingParams(temperature=0, max_tokens=15, logit_bias={5: 50}, stop_token_ids=[63])),
    Job([8] * 20, SamplingParams(temperature=0, max_tokens=3, presence_penalty=0.1)),
]


def captured_engine(method: str) -> Engine:
    """Return an engine with captured Triton kernels, lag, and few rows and blocks."""
    target, draft = tiny_model(num_layers=1), tiny_model(num_layers=1)
    return make_engine(
        target, 1, spec={"method": method}, draft_model=draft if "draft" in method else None,
        heads=random_heads(target, 1) if "medusa" in method else None, num_blocks=3,
        enforce_eager=False, async_scheduling=True, max_num_seqs=2, max_model_len=48,
        max_num_batched_tokens=16,
    )  # fmt: skip


def spy_on_plans(engine: Engine) -> list[Plan]:
    """Return a list that collects the scheduler's plans."""
    plans: list[Plan] = []
    schedule = engine.scheduler.schedule

    def spy(held: Collection[Request] = ()) -> Plan:
        plans.append(schedule(held))
        return plans[-1]

    engine.scheduler.schedule = spy  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("method", [pytest.param("medusa", marks=pytest.mark.long), "ngram+draft"])
def test_lagged_loop_never_waits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With admissions, chunked prompts, growth, preemption, an abort and releases."""
    wanted = run_alone(tiny_model(num_layers=1), JOBS, max_model_len=48)
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    with launch.forced("triton"):
        engine = captured_engine(method)
        plans = spy_on_plans(engine)
        with NoWaiting((TapeCapture, "replay")):
            given_up = engine.add([6] * 9, SamplingParams(temperature=0, max_tokens=20))
            requests = [engine.add(job.prompt, job.params) for job in JOBS]
            while engine.has_work:
                engine.step()
                if len(plans) == 3:
                    engine.abort(given_up)
    assert engine.metrics.num_preemptions
    assert any(plan.new_blocks for plan in plans)
    assert engine.metrics.spec.num_drafted
    for request, expected in zip(requests, wanted, strict=True):
        assert outcome(request).token_ids == expected.token_ids


@pytest.mark.long
def test_lagged_loop_never_waits_with_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guided steps are collected before the next is planned; masks and drafts are sent without waiting."""
    target, tokenizer = tiny_model(num_layers=1, vocab_size=300), tiny_tokenizer(tmp_path)
    response_format = {"type": "regex", "regex": "(ab|red)+-[0-9]{1,3}x"}
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, response_format=response_format)
    jobs = [Job([1, 2, 3], params), Job([5, 6, 5, 6], SamplingParams(temperature=0, max_tokens=9))]
    wanted = run_alone(target, jobs, tokenizer=tokenizer)
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    with launch.forced("triton"):
        engine = make_engine(
            tiny_model(num_layers=1, vocab_size=300), 2, tokenizer=tokenizer, max_num_seqs=2,
            max_model_len=32, enforce_eager=False, async_scheduling=True,
        )  # fmt: skip
        run(engine, jobs)  # captures all steps
        with NoWaiting((TapeCapture, "replay")):
            requests = [engine.add(job.prompt, job.params) for job in jobs]
            while engine.has_work:
                engine.step()
    for request, expected in zip(requests, wanted, strict=True):
        assert outcome(request).token_ids == expected.token_ids


def test_unchanged_step_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    with launch.forced("triton"):
        engine = captured_engine("ngram")
        for job in JOBS[:2]:
            engine.add(job.prompt, job.params)
        for _ in range(4):  # until all rows decode and have decoded once
            engine.step()
        monkeypatch.setattr(engine.scheduler, "_extend", lambda request, plan: True)
        for module in ("nanospec.device.graphs", "nanospec.kernels.transfer", "nanospec.kernels.batch"):
            monkeypatch.setattr(f"{module}.upload", None)
        engine.step()


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
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


@pytest.mark.parametrize("how", WAITING)
def test_no_waiting_rejects(how: str) -> None:
    x = torch.arange(4)
    with NoWaiting(), pytest.raises(WaitError):
        WAITING[how](x)


def test_no_waiting_allows() -> None:
    x, index = torch.arange(4), torch.tensor([1, 0])
    with NoWaiting():
        x[index] = x[index] + 1
        x[2].fill_(7)
        x[1:3].fill_(5)
        torch.where(x > 1, x, 0)
    assert x.tolist() == [1, 5, 5, 3]
