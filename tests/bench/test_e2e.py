"""`ReplayWorker` outputs the reference text."""

from __future__ import annotations

from typing import Any

import pytest

from bench.e2e import ReplayWorker
from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device import graphs
from nanospec.drafters import Target
from nanospec.drafters.methods import load_drafters
from nanospec.engine.engine import Engine
from nanospec.kernels import launch
from tests.drive import Job, run
from tests.tape import TapeCapture
from tests.tiny import tiny_model

PROMPT = [5, 6, 7, 8, 9] * 3


def config_of(k: int, eager: bool, **options: Any) -> EngineConfig:
    spec = SpecConfig(num_speculative_tokens=k)
    return EngineConfig(
        **{"spec": spec, "max_num_seqs": 4, "max_model_len": 200, "enforce_eager": eager, **options}
    )


def replay(config: EngineConfig, texts: dict[tuple[int, ...], list[int]], **shape: Any) -> Engine:
    model = tiny_model(**shape)
    drafters = load_drafters(config.spec, Target(model))
    return Engine(config, ReplayWorker(config, model, drafters, texts))


@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
@pytest.mark.parametrize("k", [0, 4])
def test_replay_outputs_reference_with_drafts(k: int, eager: bool) -> None:
    texts = {tuple(PROMPT): [5, 6, 7, 8, 9, 5, 6, 7, 1, 2, 3], (1, 2): [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3]}
    engine = replay(config_of(k, eager), texts)
    params = SamplingParams(temperature=0, max_tokens=11)
    requests = run(engine, [Job(list(prompt), params) for prompt in texts])
    for request, text in zip(requests, texts.values(), strict=True):
        assert request.output_ids == text
        assert (request.stats.num_accepted > 0) == (k > 0)


def test_replay_in_step_captured_before_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Triton kernels, with a capture that freezes host values as a CUDA graph does."""
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    text = [5, 6, 7, 8, 9, 5, 6, 1]
    config = config_of(2, False, max_num_seqs=1, max_model_len=48)
    with launch.forced("triton"):
        engine = replay(config, {tuple(PROMPT): text}, num_layers=1)
        [request] = run(engine, [Job(PROMPT, SamplingParams(temperature=0, max_tokens=8))])
    assert request.output_ids == text
    assert request.stats.num_accepted > 0
