"""Training a draft model: it begins as layers of the target, learns, and drafts in the engine."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps.training.corpus import Text
from nanospec.apps.training.data import Data, cached_hidden, split
from nanospec.apps.training.draft import DraftTrainer, Settings, main, take_layers
from nanospec.apps.training.loop import Trainer
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model
from tests.nanospec.apps.training.conftest import counting, stop, target
from tests.tiny import Pages, checkpoint
from tests.util import assert_close

SETTINGS = Settings(vocab=60, epochs=12, batch=128, lr=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of three layers whose output head is its embedding."""
    return target(tmp_path_factory.mktemp("models") / "target", "llama-tied-llama3")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Model:
    return load_model(folder, torch.float32, "cpu")


@pytest.fixture(scope="module")
def data(whole: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Data]:
    rounds = [[dataclasses.replace(text, user=2 + i % 3) for i, text in enumerate(counting(48, 24))]]
    return split(rounds, cached_hidden(whole, rounds, tmp_path_factory.mktemp("hidden")))


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "mistral-window9", "qwen3-biases-windows"])
def test_a_draft_begins_as_layers_of_the_target(tmp_path: Path, variant: str) -> None:
    folder = checkpoint(tmp_path, variant)
    texts: list[Text] = counting(4, user=3)
    empty = Data(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long), torch.zeros(1), [])
    for count, chosen in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
        model = load_model(folder, torch.float32, "cpu")
        new = DraftTrainer(model, take_layers(folder, count), Settings(count), empty, empty)
        states = new.forward(texts).split([len(text.ids) - text.user for text in texts])
        windows = tuple(model.config.windows[i] for i in chosen)
        model.layers = [model.layers[i] for i in chosen]
        model.config = dataclasses.replace(model.config, num_layers=count, windows=windows)
        for text, part in zip(texts, states, strict=True):
            expected = Pages(model, 1, 64).step({0: torch.tensor(text.ids)})[0]
            assert_close(model.logits(part), expected[text.user - 1 : -1], 1e-4, f"{count} layers")


def test_training_lowers_the_loss(
    folder: Path, whole: Model, data: tuple[Data, Data], tmp_path: Path
) -> None:
    new = DraftTrainer(whole, take_layers(folder, 2), SETTINGS, *data)
    frozen = {n: w.clone() for n, w in new.draft.named_parameters() if n not in new.weights}
    before = new.measure()
    history = new.train(tmp_path / "state.pt")
    assert [figures["epoch"] for figures in history] == list(range(1, 13))
    assert history[-1]["training_loss"] < 0.9 * history[0]["training_loss"]
    assert history[-1]["loss"] < before["loss"]
    assert history[-1]["agreement"] > before["agreement"] + 0.1
    assert history[-1]["tokens_per_step"][3] > before["tokens_per_step"][3]
    assert list(frozen) == ["model.embed_tokens.weight"]
    assert all(torch.equal(new.draft.get_parameter(name), weight) for name, weight in frozen.items())


def test_the_whole_target_agrees_with_itself(folder: Path, whole: Model, data: tuple[Data, Data]) -> None:
    figures = DraftTrainer(whole, take_layers(folder, 3), Settings(3), *data).measure()
    assert figures["agreement"] == figures["agreement_greedy"] == 1
    assert all(k < figures["tokens_per_step"][k] <= k + 1 for k in (1, 2, 3))


# The command.


def words(folder: Path, out: Path, *more: str | Path) -> list[str]:
    options: dict[str, Any] = {"--model": folder, "--out": out, "--tokens": 300, "--vocab": 60}
    options |= {"--epochs": 2, "--batch": 128, "--max-num-seqs": 8}
    return [str(word) for option in options.items() for word in option] + [str(word) for word in more]


@pytest.mark.usefixtures("small")
def test_the_result_drafts_and_changes_nothing(
    folder: Path, whole: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, prompts = tmp_path / "draft", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"ab{i}"}) + "\n" for i in range(16)))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        assert main(words(folder, out, "--prompts", prompts)) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert not out.exists()
    assert main(words(folder, out, "--prompts", prompts)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(figures["history"]) == 2
    assert figures["bytes"] == (out / "model.safetensors").stat().st_size
    ours = load_model(out, torch.float32, "cpu")
    assert ours.config == dataclasses.replace(whole.config, num_layers=2, windows=(None,) * 2)
    assert torch.equal(ours.embedding, whole.embedding)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = LLM(folder, spec=SpecConfig(method="none"), dtype="float32")
    expected = [output.token_ids for output in plain.generate(["ab", "b"], params)]
    spec = SpecConfig(method="draft", draft_model=str(out), num_speculative_tokens=3)
    outputs = LLM(folder, spec=spec, dtype="float32").generate(["ab", "b"], params)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats.num_drafted > 0 for output in outputs)


BAD: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "nothing"], "there is no model 'nothing'"),
    "layers": (["--layers", "4"], "layers=4 are too many; target has 3."),
    "no-layer": (["--layers", "0"], "layers=0 must be an integer of at least 1."),
    "out": (["--out", "."], "--out . exists already; delete it or name another folder."),
    "tokens": (["--tokens", "0"], "--tokens=0 must be an integer of at least 1."),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    more, sentence = BAD[what]
    assert main(words(folder, tmp_path / "draft", *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("Cannot train a draft model for ")
    assert sentence in error[0]


def test_transformers_may_be_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers: pip install transformers"):
        take_layers(folder, 1)
