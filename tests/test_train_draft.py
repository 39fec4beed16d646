"""Training a draft model: it begins as layers of the target, learns, resumes, and drafts in the engine."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import corpus
import pytest
import tokenizers
import torch
import train_draft
import training
from corpus import Text
from tokenizers import decoders, models, pre_tokenizers
from train_draft import Exam, Settings, Trainer, take_layers
from training import Data

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model
from tests.tiny import Pages, checkpoint
from tests.util import assert_close

SETTINGS = Settings(vocab=60, epochs=3, batch=128, lr=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of three layers with a tokenizer."""
    folder = checkpoint(tmp_path_factory.mktemp("models") / "target", "llama-tied-llama3")
    letters = ["<e>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())][:199]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(letters[:3])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Model:
    return load_model(folder, torch.float32, "cpu")


def made_up(number: int = 48) -> list[Text]:
    """Texts that count upwards, of several lengths, after prompts that are not learnt."""
    texts = []
    for i in range(number):
        ids = [(7 * i + j) % 40 for j in range(24 + i % 5)]
        texts.append(Text(ids, 2 + i % 3, 6, 0.0 if i % 3 == 0 else 0.8, "chat"))
    return texts


@pytest.fixture(scope="module")
def data(target: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Data]:
    rounds = [made_up()]
    return training.split(rounds, training.cached_hidden(target, rounds, tmp_path_factory.mktemp("h")))


def trainer(folder: Path, target: Model, data: Data, settings: Settings = SETTINGS) -> Trainer:
    return Trainer(target, take_layers(folder, settings.layers), settings, data)


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "mistral-window9", "qwen3-biases-windows"])
@pytest.mark.parametrize(("count", "chosen"), [(1, [0]), (2, [0, 2]), (3, [0, 1, 2])], ids=["1", "2", "3"])
def test_a_draft_begins_as_layers_of_the_target(
    tmp_path: Path, variant: str, count: int, chosen: list[int]
) -> None:
    model = load_model(checkpoint(tmp_path, variant), torch.float32, "cpu")
    texts = made_up(4)
    empty = Data(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long), torch.zeros(1), [])
    states = trainer(tmp_path, model, empty, Settings(count)).forward(texts)
    windows = tuple(model.config.windows[i] for i in chosen)
    model.layers = [model.layers[i] for i in chosen]
    model.config = dataclasses.replace(model.config, num_layers=count, windows=windows)
    parts = states.split([len(text.ids) - text.user for text in texts])
    for text, part in zip(texts, parts, strict=True):
        expected = Pages(model, 1, 64).step({0: torch.tensor(text.ids)})[0]
        assert_close(model.logits(part), expected[text.user - 1 : -1], 1e-4)


def test_training_lowers_the_loss(
    folder: Path, target: Model, data: tuple[Data, Data], tmp_path: Path
) -> None:
    new = trainer(folder, target, data[0], dataclasses.replace(SETTINGS, epochs=12))
    frozen = {n: w.clone() for n, w in new.draft.named_parameters() if n not in new.weights}
    exam = Exam(new, data[1])
    before = exam()
    history = train_draft.train(new, exam, tmp_path / "state.pt")
    assert [figures["epoch"] for figures in history] == list(range(1, 13))
    assert history[-1]["training_loss"] < 0.9 * history[0]["training_loss"]
    assert history[-1]["loss"] < before["loss"]
    assert history[-1]["agreement"] > before["agreement"] + 0.1
    assert history[-1]["tokens_per_step"][3] > before["tokens_per_step"][3]
    assert list(frozen) == ["model.embed_tokens.weight"]
    assert all(torch.equal(new.draft.get_parameter(name), weight) for name, weight in frozen.items())


def test_the_whole_target_agrees_with_itself(folder: Path, target: Model, data: tuple[Data, Data]) -> None:
    figures = Exam(trainer(folder, target, data[0], Settings(layers=3)), data[1])()
    assert figures["agreement"] == figures["agreement_greedy"] == 1
    assert all(k < figures["tokens_per_step"][k] <= k + 1 for k in (1, 2, 3))


@pytest.mark.parametrize("stop", [4, 13], ids=lambda step: f"step{step}")
def test_training_goes_on_to_the_same_result(
    folder: Path, target: Model, data: tuple[Data, Data], tmp_path: Path, stop: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(train_draft, "CHECKPOINT_SECONDS", -1.0)
    through = trainer(folder, target, data[0])
    expected = train_draft.train(through, Exam(through, data[1]), tmp_path / "through.pt")
    assert through.num_steps > 14
    step = Trainer.step

    def interrupted(self: Trainer) -> float:
        if self.step_number == stop:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        stopped = trainer(folder, target, data[0])
        with pytest.raises(KeyboardInterrupt):
            train_draft.train(stopped, Exam(stopped, data[1]), tmp_path / "resumed.pt")
    resumed = trainer(folder, target, data[0])
    assert train_draft.train(resumed, Exam(resumed, data[1]), tmp_path / "resumed.pt") == expected
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in through.weights.items())


def test_batches_hold_every_text_once_and_keep_the_limit(data: tuple[Data, Data]) -> None:
    batches = train_draft.bucket(data[0], 100)
    assert sorted(i for batch in batches for i in batch) == list(range(len(data[0].texts)))
    for batch in batches:
        assert len(batch) * max(len(data[0].texts[i][3].ids) for i in batch) <= 100
    assert all(len(batch) == 1 for batch in train_draft.bucket(data[0], 1))  # a text is never cut


# The command.


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few prompts, with short answers."""
    monkeypatch.setattr(corpus, "ROUND", 16)
    monkeypatch.setattr(corpus, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(training, "HELD_OUT", 4)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"ab{i}"}) + "\n" for i in range(16)))
    return path


def command(folder: Path, out: Path, *more: str | Path) -> list[str]:
    options: dict[str, Any] = {"--model": folder, "--out": out, "--tokens": 300, "--vocab": 60}
    options |= {"--epochs": 2, "--batch": 128, "--max-num-seqs": 8}
    return [str(word) for option in options.items() for word in option] + [str(word) for word in more]


def test_the_result_drafts_and_changes_nothing(
    folder: Path, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "draft"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert train_draft.main(command(folder, out, "--prompts", prompts)) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert not out.exists()
    assert train_draft.main(command(folder, out, "--prompts", prompts)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(figures["history"]) == 2
    assert figures["bytes"] == (out / "model.safetensors").stat().st_size
    ours, whole = (load_model(path, torch.float32, "cpu") for path in (out, folder))
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
    assert train_draft.main(command(folder, tmp_path / "draft", *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("Cannot train a draft model for ")
    assert sentence in error[0]


def test_transformers_may_be_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers: pip install transformers"):
        take_layers(folder, 1)
