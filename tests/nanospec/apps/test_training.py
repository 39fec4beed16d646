"""Training an EAGLE-3 drafter: data, initialization, loss, drafting, learning, saving, and the command."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps import training
from nanospec.apps.cli.main import main as command_line
from nanospec.apps.training import Data, DrafterInTraining, Settings, Texts, compute_data, main, train
from nanospec.drafters.hidden_states import lm_head_rows
from nanospec.models.decoder import Model
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.drafters.draft_reference import Reference
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


def test_compute_data(model: Model) -> None:
    texts = counting(5)
    data = compute_data(model, texts)
    parts = (column.split(data.lengths) for column in (data.states, data.hidden))
    for ids, states, hidden in zip(texts, *parts, strict=True):
        expected = ModelRunner(model, 1, 64).step({0: torch.tensor(ids)})[0]
        assert_close(model.logits(hidden), expected, 1e-5)
        assert_close(states, compute_data(model, [ids]).states, 1e-5)
    assert data.tokens.tolist() == [token for ids in texts for token in ids]
    assert data.lengths == [len(ids) for ids in texts]


def test_drafter_starts_as_regression_on_white_states(model: Model, data: tuple[Data, Data]) -> None:
    drafter = DrafterInTraining(model, Settings(vocab=40), data[0])
    states, hidden = (column.split(data[0].lengths) for column in (data[0].states, data[0].hidden))
    white = torch.cat([part[1:-1] for part in states]) @ drafter.whitening.T
    variances = torch.linalg.eigvalsh(white.T @ white / len(white))
    assert 0.99 < variances[-1] < 1.01  # those of rare directions are below 1
    wanted = torch.cat([part[2:] for part in hidden]) / model.norm.weight
    error = (white @ drafter.weights["fc"].detach().T - wanted).square().mean()
    best = torch.linalg.lstsq(white, wanted).solution
    assert error < 1.1 * (white @ best - wanted).square().mean() + 0.01 * wanted.square().mean()


def test_loss_and_gradient_are_those_of_cross_entropy(
    model: Model, data: tuple[Data, Data], tmp_path: Path
) -> None:
    """Compared with the drafter in the folder, which computes each distribution from the whole text."""
    drafter = DrafterInTraining(model, Settings(vocab=40), data[0])
    assert drafter.token_map.tolist() == list(range(40))  # all tokens that occur
    for weight in drafter.weights.values():
        weight.data.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        weight.data.copy_(weight.bfloat16())
    text = counting(1)[0][:12]
    short = compute_data(model, [text])
    batch = Texts(short, drafter).batch([0])
    loss = drafter.loss(batch, 3)
    drafter.save(tmp_path, {})
    embedding = lm_head_rows(model, torch.arange(model.config.vocab_size))
    reference = Reference(tmp_path, embedding, embedding, lambda ids: short.states[: len(ids)].double())
    reference.weights["fc.weight"] = (drafter.weights["fc"] @ drafter.whitening).detach().double()
    labels = (short.hidden @ drafter.head.T).double().softmax(-1)
    expected = 0.0
    for j in range(3):
        ends = range(2, len(text) - j + 1)  # entry end - 2 gives the distribution of token end + j
        logits = torch.stack([reference.eagle3(text[:end], text[end : end + j]) for end in ends])
        wanted = labels[1 + j : 1 + j + len(ends)]
        expected += training.DECAY**j * float(F.cross_entropy(logits, wanted))
    assert loss.item() == pytest.approx(expected / sum(training.DECAY**j for j in range(3)), rel=1e-4)
    three = Texts(compute_data(model, [text[:3]]), drafter).batch([0])
    assert drafter.loss(three, 5) > 0  # a text may be shorter than the passes
    h = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    logits, p = h @ drafter.head.T, labels[:9].float()
    [gradient] = torch.autograd.grad(F.cross_entropy(logits, p, reduction="sum"), h)
    [own] = torch.autograd.grad(training.cross_entropy(h, drafter.head, p @ drafter.head), h)
    assert_close(own, gradient, 1e-5)


def test_measured_drafts_lie_within_their_text(model: Model, data: tuple[Data, Data]) -> None:
    """Of a text of 5 tokens, 3 can be drafted."""
    drafter: Any = DrafterInTraining(model, Settings(vocab=40), data[0])
    texts = Texts(compute_data(model, [[1, 2, 3, 4, 5], [6, 7, 8, 7, 9, 9]]), drafter)
    drafter.head, embedding = torch.eye(40), torch.eye(40)

    def outputs(batch: Any, passes: int, draft: Any) -> Any:  # counts upwards
        ids = batch.tokens[:, 1:]
        for _ in range(passes):
            yield embedding[ids]
            ids = draft(embedding[(ids + 1) % 40])

    drafter.outputs = outputs
    figures = training.measure(drafter, texts)
    # First drafts: 3, 4, 5 match; of 8, 9, 8, 10, the first. Then 4, 5 match; of 9, 10, 9, none. Then 5.
    assert figures["accepted"][:4] == [0.5714, 0.4, 0.3333, 0.0]


def test_train_learns_and_saves_a_drafter(tmp_path: Path) -> None:
    """The target predicts counting, which a random model does not."""
    target, folder = tiny_model(tie_word_embeddings=True), tmp_path / "new" / "drafter"
    states = torch.randn(64, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    target.embedding[:40] = 2 * states[:40].roll(1, 0)  # a state has the largest product with the next token
    parts = compute_data(target, counting(62)), compute_data(target, counting(3))
    known = tuple(part._replace(hidden=states[part.tokens]) for part in parts)
    figures = train(target, Settings(40, 64, 3, 0.1, 14, 128, 0.02), known, folder)  # type: ignore[arg-type]
    first, last = figures["history"][0], figures["history"][-1]
    assert first["accepted"][:2] == [1.0, 0.0]  # the regression suffices for first drafts
    assert last["loss"] < 0.1
    assert last["accepted"][2] > 0.9
    assert last["tokens_per_step"] > 3.5
    with safe_open(folder / "model.safetensors", "pt") as handle:
        assert json.loads(handle.metadata()["nanospec"]) == figures
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_divergence_is_an_error(model: Model, data: tuple[Data, Data], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"diverged \(loss (nan|inf)\); set a lower --lr than 0.01"):
        train(model, Settings(40, 64, 2, math.inf, 2, 128, 0.01), data, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_train_command_writes_a_working_drafter(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "drafter"
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
    options = ["--vocab", "20", "--intermediate", "32", "--passes", "2", "--epochs", "2", "--batch", "64"]
    assert main(["--model", str(folder), "--text", str(text), "--out", str(out), *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["folder"], figures["model"]) == (str(out), folder.name)
    assert figures["positions"] == sum(map(len, texts[1:16] + texts[17:]))  # every 16th text is held out
    spec = SpecConfig(method="eagle3", draft_model=str(out), num_speculative_tokens=2)
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
        ("", f"--out {text} must be a folder.", "--out", str(text)),
        ("", f"{folder} already has a model or a drafter; set another --out.", "--out", str(folder)),
        ('{"text": "abc"}', "has 1 texts of at least 3 tokens, but 2 are needed, one of them to measure."),
        ("{", "line 1: invalid JSON (Expecting property name"),
        ('{"prompt": "a"}', 'line 1: a line must be {"text": "..."} or {"messages": [...]}.'),
    ):
        text.write_text(line)
        arguments = ["--model", str(folder), "--text", str(text), "--out", str(tmp_path / "drafter")]
        assert command_line(["train", *arguments, *options]) == 2
        [error] = capsys.readouterr().err.strip().splitlines()
        assert sentence in error
