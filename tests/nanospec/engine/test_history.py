"""Lookup in the texts of earlier requests: which are found, for which key, in how much memory."""

import random

import pytest

from nanospec.engine import history
from nanospec.engine.engine import Engine
from nanospec.engine.history import History
from nanospec.engine.request import Request
from nanospec.models.decoder import Model
from tests.drive import MODES, finish, greedy, make_engine
from tests.tiny import tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(vocab_size=200, max_position_embeddings=128)


def run(engine: Engine, prompt: list[int], salt: bytes, max_tokens: int) -> Request:
    request = engine.add(prompt, greedy(max_tokens), salt=salt)
    finish(engine)
    return request


@pytest.mark.parametrize("mode", MODES)
def test_only_texts_of_the_same_key_are_searched(model: Model, mode: str) -> None:
    """The second request continues the first; the drafts that predict it occur only in the first's output."""

    def steps(first: bytes, second: bytes, **spec: bool) -> int:
        engine = make_engine(model, 6, spec=spec, **MODES[mode])
        output = run(engine, PROMPT, first, 40).output_ids
        request = run(engine, PROMPT + output[:5], second, 35)
        assert request.output_ids == output[5:]
        assert request.completion().num_accepted_prediction_tokens == 0
        return request.stats.num_steps

    alone = steps(b"one", b"one", prompt_lookup_history=False)
    assert steps(b"one", b"two") == steps(b"", b"two") == steps(b"one", b"") == alone
    assert steps(b"one", b"one") == steps(b"", b"") < alone / 2


def test_similar_then_recent_texts_fill_the_reference() -> None:
    """The best text is last; texts that do not fit are omitted."""
    texts, found = [[*range(i, i + 40)] for i in range(0, 1000, 100)], History(130)
    for text in texts:
        found.add(b"", text)
    prompt = texts[3][:35]
    assert found.search(b"", prompt).tolist() == [*texts[8], -1, *texts[9], -1, *texts[3], -1]
    assert found.search(b"other", prompt).tolist() == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest texts of a key are removed, then those of the key that was used least recently."""
    monkeypatch.setattr(history, "MAX_PER_KEY", 100)
    monkeypatch.setattr(history, "MAX_TOKENS", 250)
    found, rng = History(80), random.Random(0)
    for _ in range(300):
        found.add(rng.choice((b"a", b"b", b"c", b"d")), [1] * rng.randrange(1, 120))
        lengths = [sum(len(text) for text, _ in texts) for texts in found._by_key.values()]
        assert sum(lengths) == found.num_tokens <= 250
        assert max(lengths) <= 100
    found = History(80)
    for key in b"a", b"b", b"a", b"c", b"c":
        found.search(key, [1])
        found.add(key, [2] * 59)
    found.search(b"a", [1])
    found.add(b"d", [2] * 79)
    assert [len(found.search(key, [1])) for key in (b"a", b"b", b"c", b"d")] == [60, 0, 60, 80]
