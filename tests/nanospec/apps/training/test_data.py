"""Hidden states of texts, what is held out, and the loss over a part of the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanospec.apps.training import data
from nanospec.apps.training.corpus import Text
from nanospec.apps.training.loss import FrozenCrossEntropy, most_frequent
from nanospec.models.decoder import Model
from tests.nanospec.apps.training.conftest import counting
from tests.tiny import Pages, tiny_model
from tests.util import assert_close


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(tie_word_embeddings=True)


def test_hidden_states_are_those_of_each_text_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "FORWARD_TOKENS", 100)  # several passes
    texts = counting(5)
    for text, states in zip(texts, data.hidden_states(model, texts), strict=True):
        expected = Pages(model, 1, 64).step({0: torch.tensor(text.ids)})[0]
        assert_close(model.logits(states), expected[1:], 1e-5)


def test_hidden_states_are_not_computed_twice(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [counting(3), counting(5), counting(4)]
    expected = data.cached_hidden(model, rounds, tmp_path / "at once")
    data.cached_hidden(model, rounds[:2], tmp_path / "resumed")
    done: list[int] = []
    compute = data.hidden_states

    def counted(model: Model, texts: list[Text], bar: Any) -> list[Tensor]:
        done.append(len(texts))
        return compute(model, texts, bar)

    monkeypatch.setattr(data, "hidden_states", counted)
    resumed = data.cached_hidden(model, rounds, tmp_path / "resumed")
    assert done == [4]
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
    with pytest.raises(ValueError, match=r"hidden-0000.safetensors does not belong to the texts"):
        data.cached_hidden(model, [rounds[1]], tmp_path / "resumed")


def test_some_texts_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "HELD_OUT", 4)
    rounds = [counting(3), counting(6)]
    parts = [torch.cat([torch.tensor(text.ids[1:])[:, None] for text in texts]) for texts in rounds]
    texts = [text for texts in rounds for text in texts]
    for part, chosen in zip(data.split(rounds, parts), (texts[1:4] + texts[5:8], texts[::4])):
        assert [span.text for span in part.spans] == chosen
        for span, text in zip(part.spans, chosen):
            assert part.hidden[span.start : span.end, 0].tolist() == text.ids[1:]
            assert part.tokens[span.start : span.end].tolist() == text.ids[1:]
            assert part.tokens[span.answer + 1] == text.ids[text.answer]
            assert part.left[span.start : span.end].tolist() == list(range(len(text.ids) - 1))[::-1]
    with pytest.raises(ValueError, match="too few texts to train on"):
        data.split([texts[:1]], [parts[0][: len(texts[0].ids) - 1]])


def test_texts_of_like_length_keep_the_limit() -> None:
    texts = counting(48)
    groups = data.by_length(texts, 100)
    assert sorted(i for group in groups for i in group) == list(range(48))
    assert all(len(group) * max(len(texts[i].ids) for i in group) <= 100 for group in groups)
    assert all(len(group) == 1 for group in data.by_length(texts, 1))  # a text is never cut


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_frozen_cross_entropy_is_the_usual_one(labels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, projection = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (5, 11))
    x.requires_grad_()
    weight = torch.rand(5, generator=generator, dtype=torch.float64)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64)
    target = logits.softmax(-1) if labels == "soft" else logits.argmax(-1)
    expected = (F.cross_entropy(x @ projection.T, target, reduction="none") * weight).sum() * 3
    (gradient,) = torch.autograd.grad(expected, x)
    actual = FrozenCrossEntropy.apply(x, projection, target, weight) * 3
    assert_close(actual, expected, 1e-6)  # it sums in float32
    assert_close(torch.autograd.grad(actual, x)[0], gradient, 1e-6)


def test_the_vocabulary_is_the_most_frequent() -> None:
    tokens = torch.tensor([5, 5, 5, 9, 9, 3])
    assert most_frequent(tokens, 2, 64).tolist() == [5, 9]
    assert most_frequent(tokens, 5, 64).tolist() == [0, 1, 3, 5, 9]
    assert most_frequent(tokens, 0, 7).tolist() == list(range(7))
