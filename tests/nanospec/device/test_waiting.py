"""Captured Triton steps in a running engine: the host never waits for the device, in admissions or anywhere
else, and no value of the host is frozen into a capture."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec import SamplingParams
from nanospec.device import graphs, worker
from nanospec.kernels import launch
from tests.drive import Job, make_engine, outcome, run, run_alone
from tests.nanospec.extras.tracing.records import check
from tests.no_gpu import NoWaiting, TapeCapture
from tests.tiny import tiny_model, tiny_tokenizer

JOBS = [
    Job([1, 2, 3, 1, 2] * 5, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[63])),  # two chunks
    Job([7, 5] * 4, SamplingParams(temperature=0, max_tokens=4, presence_penalty=0.1, logit_bias={5: 50})),
    Job([9, 4] * 2, SamplingParams(temperature=0.8, seed=-3, top_k=5, max_tokens=3, acceptance="exact")),
]
REGEX = {"type": "regex", "regex": "(ab|red)+-[0-9]{1,3}x"}
GUIDED = Job([1, 2, 3], SamplingParams(temperature=1, seed=1, max_tokens=12, response_format=REGEX))
SETUPS: dict[str, dict[str, Any]] = {
    "ngram-tree+draft": {"method": "ngram+draft", "tree_width": 2, "acceptance": "typical"},
    "dflash": {"method": "dflash"},
    "eagle3": {"method": "eagle3"},
    "grammar": {"method": "ngram"},
}
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2, "num_blocks": 3, "max_model_len": 48, "max_num_batched_tokens": 16,
    "enforce_eager": False, "async_scheduling": True, "trace": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup", [name if "draft" in name else pytest.param(name, marks=pytest.mark.long) for name in SETUPS]
)
def test_captured_steps_never_wait_and_freeze_no_host_values(
    setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run admissions, chunked prompts, cache growth, preemption, an abort and releases."""
    guided = setup == "grammar"
    tokenizer, jobs = tiny_tokenizer(tmp_path) if guided else None, JOBS + [GUIDED] * guided
    make_model = partial(tiny_model, num_layers=1, vocab_size=300 if guided else 64)
    wanted = run_alone(make_model(), jobs, max_model_len=48, tokenizer=tokenizer)
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    monkeypatch.setattr(graphs, "batch_sizes", lambda largest: [largest])
    monkeypatch.setattr(worker, "KS", (0,))
    with launch.forced("triton"):
        target, options = make_model(), {**OPTIONS, "tokenizer": tokenizer}
        if "draft" in setup:
            options["draft_model"] = make_model()
        engine = make_engine(target, 1 if guided else 2, spec=SETUPS[setup], **options)
        if guided:  # steps with extensions are captured on use
            run(engine, jobs)
        assert engine.worker.graphs is not None
        replays, unchanged = engine.worker.graphs.replays, 0
        with NoWaiting((TapeCapture, "replay")) as device:
            requests = [engine.add(job.prompt, job.params) for job in jobs]
            aborted = engine.add([6] * 9, SamplingParams(temperature=0, max_tokens=20))
            while engine.has_work:
                before = device.uploads, replays.total()
                engine.step()
                unchanged += device.uploads == before[0] and replays.total() > before[1]
                if aborted in engine.scheduler.running:
                    engine.abort(aborted)
    assert engine.metrics.num_preemptions
    assert engine.metrics.spec.num_drafted
    assert unchanged > 0, "every step uploaded its rows"
    for request, expected in zip(requests, wanted, strict=True):
        assert outcome(request).token_ids == expected.token_ids
        check(request)


def test_waiting_operations_are_detected() -> None:
    x = torch.arange(4)
    for waits in (lambda: x[0].item(), lambda: x[x > 1], lambda: x.tolist()):
        with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
            waits()
