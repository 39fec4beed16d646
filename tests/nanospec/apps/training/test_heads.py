"""Training Medusa heads: they begin as the target's own, learn, are measured and saved, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps.training import command, heads
from nanospec.apps.training.corpus import Text
from nanospec.apps.training.data import Data, cached_hidden, hidden_states, split
from nanospec.apps.training.heads import HeadsTrainer, Settings, default_out, main, measure, save_heads
from nanospec.apps.training.loop import Trainer
from nanospec.models.decoder import Model
from nanospec.models.heads import Heads
from tests.nanospec.apps.training.conftest import counting, stop
from tests.tiny import tiny_model
from tests.util import assert_close


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def data(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Data]:
    rounds = [counting(24), counting(9)]
    return split(rounds, cached_hidden(model, rounds, tmp_path_factory.mktemp("hidden")))


def test_a_head_begins_as_the_targets_own(model: Model, data: tuple[Data, Data]) -> None:
    for layers in (1, 2):
        guesses = HeadsTrainer(model, Settings(3, layers, vocab=0), *data).guess(data[1].hidden)
        own = model.logits(data[1].hidden).topk(heads.RANKS).indices
        assert all(torch.equal(guesses[:, head], own) for head in range(3))


@pytest.mark.parametrize("settings", [
    Settings(2, 1, 40, 40, 64, 0.02, labels="hard"),
    Settings(2, 2, 40, 40, 64, 0.02, labels="hard"),
    Settings(1, 1, 0, 40, 64, 0.02, labels="soft"),
], ids=["hard", "hard-2-blocks", "soft-all-tokens"])  # fmt: skip
def test_training_lowers_the_loss(
    model: Model, data: tuple[Data, Data], tmp_path: Path, settings: Settings
) -> None:
    new = HeadsTrainer(model, settings, *data)
    before = measure(new.guess, data[1])["all"]
    history = new.train(tmp_path / "state.pt")
    after = measure(new.guess, data[1])["all"]
    assert len(history) == settings.epochs
    assert history[-1]["loss"] < (0.5 if settings.labels == "hard" else 0.99) * history[0]["loss"]
    if settings.labels == "hard":  # a random model knows nothing of counting, its text does
        assert min(after["accuracy"]) > 0.9 > 0.5 > max(before["accuracy"])
        assert after["tokens_per_step"] > 2.5 > 1.5 > before["tokens_per_step"]


def test_a_saved_head_is_the_trained_one(model: Model, data: tuple[Data, Data], tmp_path: Path) -> None:
    for vocab in (40, 0):
        new = HeadsTrainer(model, Settings(2, 2, vocab, 2, 64, 0.02, labels="hard"), *data)
        new.train(tmp_path / f"{vocab}.pt")
        save_heads(tmp_path / "heads.safetensors", new, {"seed": 0})
        saved = Heads.load(tmp_path / "heads.safetensors", model)
        assert (saved.token_map is None) == (vocab == 0)
        expected = (new.forward(data[1].hidden) @ new.projection.T).transpose(0, 1)
        assert_close(saved.logits(data[1].hidden), expected, 1e-2)  # it is saved in bf16
        with safe_open(tmp_path / "heads.safetensors", "pt") as file:
            assert json.loads(file.metadata()["nanospec"]) == {"seed": 0}


def test_measuring_counts_what_a_chain_would_gain(data: tuple[Data, Data]) -> None:
    held_out = data[1]

    def oracle(offset: int) -> Any:
        place = iter(held_out.hidden.split(heads.EVAL_ROWS))
        ends = torch.cat([held_out.tokens, torch.full((4,), -1)])

        def guess(part: Tensor) -> Tensor:
            assert torch.equal(part, next(place))
            rows = torch.arange(len(part))
            return torch.stack([ends[rows + 2 + head] + offset for head in range(2)], 1)[..., None]

        return guess

    for offset, accuracy, least, most in ((0, 1.0, 2.7, 3.0), (50, 0.0, 1.0, 1.0)):
        figures = measure(oracle(offset), held_out)
        for part in figures.values():
            assert part["accuracy"] == [accuracy] * 2
            assert least <= part["tokens_per_step"] <= most
        assert figures["greedy"]["positions"] + figures["sampled"]["positions"] == figures["all"]["positions"]


def test_the_heads_that_are_here_foresee_the_model(smollm2: Path) -> None:
    file = smollm2.parent / "heads" / f"{smollm2.name}.safetensors"
    if not file.is_file():
        pytest.skip(f"needs {file.name}: nanospec train heads --model {smollm2.name}")
    llm = LLM(smollm2, spec=SpecConfig(method="none"), max_model_len=256, max_num_seqs=1)
    prompt = llm.chat_prompt([{"role": "user", "content": "How do I bake bread? Explain step by step."}])
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=60))[0].token_ids
    text = Text(prompt + output, len(prompt), len(prompt), 0.0, "chat")
    model = llm.engine.worker.model
    saved = Heads.load(file, model)
    _, held_out = split([[text]] * 2, hidden_states(model, [text]) * 2)
    accuracy = measure(lambda part: saved.top(part, 1), held_out)["all"]["accuracy"]
    assert len(accuracy) == saved.num_heads
    assert accuracy[0] > 0.2  # far from chance; a tiny model, and only the first guess


# The command.


def words(folder: Path, out: Path, *more: str) -> list[str]:
    options = {"--model": folder, "--out": out, "--tokens": 500, "--num-heads": 2, "--vocab": 50}
    options |= {"--epochs": 2, "--batch": 64, "--max-num-seqs": 8}
    return [str(word) for option in options.items() for word in option] + list(more)


@pytest.mark.usefixtures("small")
def test_the_command_resumes_to_the_same_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    assert main(words(folder, once)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["bytes"] == once.stat().st_size
    assert figures["seconds"].keys() == {"text", "hidden", "training"}
    assert len(figures["held_out"]["all"]["accuracy"]) == 2
    for place, stage in ((command, "cached_hidden"), (Trainer, "train"), (heads, "measure")):
        with monkeypatch.context() as patch:
            patch.setattr(place, stage, stop)
            assert main(words(folder, twice)) == 130
        assert "goes on from here" in capsys.readouterr().err
        assert not twice.exists()
    answers = sorted((tmp_path / ".twice-work" / "text").glob("answers-*.jsonl"))[-1]
    answers.write_bytes(b"".join(answers.read_bytes().splitlines(keepends=True)[:2]))  # killed while writing
    assert main(words(folder, twice)) == 0
    first, second = load_file(once), load_file(twice)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_work_folder_has_one_owner(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.claim(tmp_path / ".heads-work", folder, None, seed=1)
    assert main(words(folder, tmp_path / "heads.safetensors")) == 1
    assert "was begun with seed=1, not 0; name another folder or delete it." in capsys.readouterr().err


def test_heads_go_where_they_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "none", tmp_path / "there", tmp_path / "cache"]
    monkeypatch.setattr(heads, "weights_folders", lambda: folders)
    assert default_out("name") == tmp_path / "cache" / "heads" / "name.safetensors"
    folders[1].mkdir()
    assert default_out("name") == tmp_path / "there" / "heads" / "name.safetensors"


BAD: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "nothing"], "there is no model 'nothing'"),
    "tokens": (["--tokens", "0"], "--tokens=0 must be an integer of at least 1."),
    "heads": (["--num-heads", "0"], "num_heads=0 must be an integer from 1 to 16."),
    "labels": (["--labels", "mushy"], "labels='mushy' must be 'soft' or 'hard'."),
    "out": (["--out", "heads.bin"], "--out heads.bin must end in .safetensors."),
    "prompts": (["--prompts", "nowhere.jsonl"], "No such file"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    more, sentence = BAD[what]
    assert main(words(folder, tmp_path / "heads.safetensors", *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("Cannot train heads for ")
    assert sentence in error[0]
