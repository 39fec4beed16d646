"""Training that is interrupted ends as if nothing had happened, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanospec.apps.training import draft, heads, loop
from nanospec.apps.training.data import cached_hidden, split
from nanospec.apps.training.loop import Trainer
from nanospec.models.weights import load_model
from tests.nanospec.apps.training.conftest import counting

HEADS = heads.Settings(num_heads=2, vocab=40, epochs=3, batch=64, lr=0.02)
DRAFT = draft.Settings(vocab=60, epochs=3, batch=128, lr=0.01)


@pytest.fixture(scope="module", params=["heads", "draft"])
def new(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Makes a trainer, always the same one."""
    model, rounds = load_model(folder, torch.float32, "cpu"), [counting(24)]
    train, held_out = split(rounds, cached_hidden(model, rounds, tmp_path_factory.mktemp("hidden")))
    if request.param == "heads":
        return lambda: heads.HeadsTrainer(model, HEADS, train, held_out)
    return lambda: draft.DraftTrainer(model, draft.take_layers(folder, 2), DRAFT, train, held_out)


@pytest.fixture(scope="module")
def through(new: Callable[[], Trainer], tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, list]:
    """A training without interruption, and its history."""
    trainer = new()
    return trainer, trainer.train(tmp_path_factory.mktemp("through") / "state.pt")


@pytest.mark.parametrize("stop", [3, 10, 13], ids=lambda step: f"step{step}")
def test_training_goes_on_to_the_same_result(
    new: Callable[[], Trainer], through: tuple[Trainer, list], tmp_path: Path, stop: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    expected, history = through
    assert expected.num_steps > 14
    assert [figures["epoch"] for figures in history] == [1, 2, 3]
    step = Trainer.step

    def interrupted(self: Trainer) -> float:
        if self.step_number == stop:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            new().train(tmp_path / "state.pt")
    resumed = new()
    assert resumed.train(tmp_path / "state.pt") == history
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in expected.weights.items())
    assert new().train(tmp_path / "state.pt") == history  # all done
