"""`ReplayWorker` outputs the reference text, with and without drafts, in packed and captured steps."""

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

TEXTS: dict[tuple[int, ...], list[int]] = {
    (5, 6, 7, 8, 9) * 3: [5, 6, 7, 8, 9, 5, 6, 1],
    (1, 2): [3, 4, 3, 4, 3, 4, 3, 4],
}


@pytest.mark.slow
@pytest.mark.parametrize(("k", "mode"), [(0, "packed"), (4, "captured"), (2, "tape")])
def test_replay_outputs_reference(k: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode "tape" runs Triton kernels with a capture that freezes host values, as a CUDA graph does."""
    texts, size, backend = TEXTS, 4, "auto"
    if mode == "tape":
        texts, size, backend = {(5, 6, 5): [6, 5, 6, 1]}, 1, "triton"
        monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    spec = SpecConfig(num_speculative_tokens=k)
    config = EngineConfig(spec=spec, max_num_seqs=size, max_model_len=32, enforce_eager=mode == "packed")
    with launch.forced(backend):  # type: ignore[arg-type]
        model = tiny_model(num_layers=1)
        drafters = load_drafters(spec, Target(model))
        engine = Engine(config, ReplayWorker(config, model, drafters, texts))
        params = [SamplingParams(temperature=0, max_tokens=len(text)) for text in texts.values()]
        requests = run(engine, [Job([*prompt], own) for prompt, own in zip(texts, params)])
    for request, text in zip(requests, texts.values(), strict=True):
        assert request.output_ids == text
        assert (request.stats.num_accepted > 0) == (k > 0)
