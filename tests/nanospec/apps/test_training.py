"""Training Medusa heads: initialization, loss, learning, measurement, saving, and the command."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps import training
from nanospec.apps.cli.main import main as command_line
from nanospec.apps.training import Data, HeadsInTraining, Settings, compute_data, main, train
from nanospec.drafters.medusa import Heads
from nanospec.models.decoder import Model
from nanospec.text.tokenizer import Tokenizer
from tests.tiny import ModelRunner, tiny_model
from tests.util import assert_close

Capture = pytest.CaptureFixture[str]


def counting(number: int) -> list[list[int]]:
    """Return easily predicted texts of several lengths that count upwards modulo 40 from any start."""
    return [[(7 * i + j) % 40 for j in range(30 + i % 5)] for i in range(number)]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def data(model: Model) -> tuple[Data, Data]:
    return compute_data(model, counting(31)), compute_data(model, counting(2))


def test_compute_data_is_independent_of_batching(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FORWARD_TOKENS", 100)  # several forward passes
    texts = counting(5)
    data = compute_data(model, texts)
    for ids, states in zip(texts, data.hidden.split(list(map(len, texts))), strict=True):
        expected = ModelRunner(model, 1, 64).step({0: torch.tensor(ids)})[0]
        assert_close(model.logits(states), expected, 1e-5)
    assert data.tokens.tolist() == [token for ids in texts for token in ids]
    assert data.num_following.tolist() == [left for ids in texts for left in reversed(range(len(ids)))]


def test_heads_start_as_the_target_lm_head(model: Model, data: tuple[Data, Data], tmp_path: Path) -> None:
    HeadsInTraining(model, Settings(3, 2, vocab=0), data[0].tokens).save(tmp_path / "heads.safetensors", {})
    saved = Heads.load(tmp_path / "heads.safetensors", model)
    own = model.logits(data[1].hidden)
    assert all(torch.equal(head, own) for head in saved.logits(data[1].hidden).unbind(1))


def test_loss_is_cross_entropy_with_target_distribution(model: Model, data: tuple[Data, Data]) -> None:
    """Positions whose target lies beyond the end of their text do not count."""
    heads = HeadsInTraining(model, Settings(2, 1, vocab=40), data[0].tokens)
    assert heads.token_map.tolist() == list(range(40))  # all tokens that occur
    with torch.no_grad():
        heads.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    loss = heads.backward(data[0], torch.tensor([0, 64]))
    rows = torch.cat([torch.arange(32), torch.arange(64, 96)])
    expected = []
    for i in range(2):
        kept = rows[data[0].num_following[rows] >= 1 + i]
        wanted = (data[0].hidden[kept + 1 + i] @ heads.projection.T).softmax(-1)
        logits = heads.states(data[0].hidden[kept])[i] @ heads.projection.T
        expected.append(F.cross_entropy(logits, wanted) * (1, 0.8)[i] / 1.8)
    assert_close(torch.tensor(loss), torch.stack(expected).sum().detach(), 1e-5)


def test_measured_drafts_lie_within_their_text() -> None:
    drafts = torch.tensor([[3, 0], [4, 5], [5, 6], [6, 6], [0, 0], [0, 0]])  # 2 and 3 tokens ahead
    heads: Any = SimpleNamespace(num_heads=2, logits=F.one_hot, tokens=lambda ids: ids)
    data = Data(drafts, torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([3, 2, 1, 0, 1, 0]))
    figures = training.measure(heads, data, torch.device("cpu"))
    assert figures == {"accuracy": [1.0, 0.0], "tokens_per_step": 2.0}


def test_train_learns_and_saves_heads(model: Model, data: tuple[Data, Data], tmp_path: Path) -> None:
    """The target predicts counting, which a random model does not."""
    target, file = tiny_model(tie_word_embeddings=True), tmp_path / "new" / "heads.safetensors"
    states = torch.randn(40, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    target.embedding[:40] = states.roll(1, 0)  # a token's state has the largest product with the next token
    known = tuple(part._replace(hidden=states[part.tokens]) for part in data)
    figures = train(target, Settings(2, 1, 40, 30, 64, 0.02), known, file)  # type: ignore[arg-type]
    first, last = figures["history"][0], figures["history"][-1]
    assert last["loss"] < 0.5 * first["loss"]
    assert min(last["accuracy"]) > 0.9
    assert last["tokens_per_step"] > 2.5
    with safe_open(file, "pt") as handle:
        assert json.loads(handle.metadata()["nanospec"]) == figures
        assert all(handle.get_tensor(name).any() for name in handle.keys())  # noqa: SIM118
    with pytest.raises(ValueError, match="the text has 34 tokens, too few to train on"):
        train(model, Settings(), (data[0]._replace(tokens=data[0].tokens[:34]), data[1]), file)


def test_train_command_writes_working_heads(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "heads.safetensors"
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    lines = [{"text": f"abc\u2028 {'def' * i}"} for i in range(17)]  # U+2028 does not end a line
    every = *lines, {"text": "a"}, {"messages": messages}
    text.write_text("".join(json.dumps(line) + "\n" for line in every))
    tokenizer = Tokenizer(folder)
    monkeypatch.setattr(tokenizer, "encode", Mock(wraps=tokenizer.encode))
    texts = training.read_texts(text, tokenizer, 99)
    assert tokenizer.encode.call_args.kwargs == {"add_special_tokens": False}  # type: ignore[attr-defined]
    assert [tokenizer.decode(ids) for ids in texts] == [*(f"abc {'def' * i}" for i in range(17)), "abcd"]
    assert training.read_texts(text, tokenizer, 30) == [ids[:30] for ids in texts]
    options = ["--num-heads", "2", "--vocab", "20", "--epochs", "2", "--batch", "64"]
    assert main(["--model", str(folder), "--text", str(text), "--out", str(out), *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["file"], figures["model"]) == (str(out), folder.name)
    assert figures["positions"] == sum(map(len, texts[1:16] + texts[17:]))  # every 16th text is held out
    spec = SpecConfig(method="medusa", heads=str(out), num_speculative_tokens=2)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain, speculative = (
        LLM(folder, spec=each, dtype="float32").generate("ab", params)[0]
        for each in (SpecConfig(method="none"), spec)
    )
    assert speculative.token_ids == plain.token_ids
    assert speculative.stats.num_drafted > 0


def test_invalid_input_is_reported_in_one_line(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "text.jsonl"
    for line, sentence, *options in (
        ("", "unknown model 'nothing'", "--model", "nothing"),
        ("", "--out heads.bin must have the suffix .safetensors.", "--out", "heads.bin"),
        ('{"text": "abc"}', "has 1 texts, too few for training and held-out texts."),
        ("{", "line 1: Expecting property name"),
        ('{"prompt": "a"}', 'line 1: a line must be {"text": "..."} or {"messages": [...]}.'),
    ):
        text.write_text(line)
        arguments = ["--model", str(folder), "--text", str(text), "--out", str(tmp_path / "h.safetensors")]
        assert command_line(["train", *arguments, *options]) == 2
        [error] = capsys.readouterr().err.strip().splitlines()
        assert sentence in error
