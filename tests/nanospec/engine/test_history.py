"""Lookup in the texts of earlier requests: which are found, for which key, in how much memory."""

import random

import pytest

from nanospec.config import SamplingParams
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


def test_lossy_outputs_do_not_depend_on_earlier_requests(model: Model) -> None:
    spec = {"acceptance": "typical"}
    engine, params = make_engine(model, 4, spec=spec), SamplingParams(temperature=1, seed=1, max_tokens=40)
    outputs = []
    for _ in range(2):
        request = engine.add(PROMPT, params)
        finish(engine)
        outputs.append(request.output_ids)
    assert outputs[0] == outputs[1]


def test_similar_then_recent_texts_fill_the_reference() -> None:
    """The best text is last; texts that do not fit are omitted."""
    texts, found = [[*range(i, i + 40)] for i in range(0, 1000, 100)], History(130)
    for text in texts:
        found.add(b"", text)
    prompt = texts[3][:35]
    assert found.search(b"", prompt).tolist() == [*texts[8], -1, *texts[9], -1, *texts[3], -1]
    assert found.search(b"other", prompt).tolist() == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest texts of a key are removed, and the key that was used least recently."""
    monkeypatch.setattr(history, "MAX_TOKENS", 100)
    monkeypatch.setattr(history, "MAX_TEXTS", 4)
    monkeypatch.setattr(history, "MAX_KEYS", 3)
    found, rng, keys = History(80), random.Random(0), [bytes([i]) for i in range(5)]
    used = list[bytes]()
    for _ in range(300):
        key = rng.choice(keys)
        found.search(other := rng.choice(keys), [1])
        found.add(key, [1] * (length := rng.randrange(1, 120)))
        used = [each for each in used if each != other] + [other] * (other in used)
        used = [each for each in used if each != key] + [key] if length >= 16 else used
        used = used[-3:]
        assert [*found._by_key] == used
        for texts in found._by_key.values():
            assert sum(len(text) for text, _ in texts) <= 100
            assert len(texts) <= 4
    texts = found._by_key[used[-1]]
    for i in range(5):
        found.add(used[-1], [i] * 20)
    assert [int(text[0]) for text, _ in texts] == [1, 2, 3, 4]
