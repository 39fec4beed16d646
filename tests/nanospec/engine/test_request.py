"""Requests: stop strings, grammars, log-probabilities and validation."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nanospec.config import EngineConfig, SamplingParams
from nanospec.device.messages import logprobs_by_id
from nanospec.engine.request import Limits, Request
from nanospec.kernels import FROM_REFERENCE, FROM_TARGET, LENGTH, MAX_STOP_IDS, RUNNING, STOPPED
from nanospec.kernels.speculation.report import RowReport
from nanospec.outputs import Logprob
from nanospec.text.tokenizer import OutputText, Tokenizer
from tests.nanospec.text.conftest import byte_fallback


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with byte tokens; a run of them is decoded when it ends."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_fallback().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [tokenizer.backend.get_vocab()[text] for text in texts]


def request_for(tokenizer: Tokenizer | None, **params: Any) -> Request:
    sampling = SamplingParams(**params)
    output = OutputText(tokenizer, sampling.stop, sampling.min_tokens)
    return Request(id="a", prompt_ids=[5], params=sampling, seed=0, max_len=99, output=output)


def step(tokens: list[int], finished: int = RUNNING) -> RowReport:
    return RowReport(tokens, 0, 0, 0, 0, finished, [FROM_TARGET] * len(tokens))


@pytest.mark.parametrize(("ends", "reason"), [("length", "stop"), ("abort", "abort")])
def test_stop_string_in_flushed_text_is_cut(bytes_only: Tokenizer, ends: str, reason: str) -> None:
    request = request_for(bytes_only, stop="ñ")
    request.append(step(ids_of(bytes_only, *(f"<0x{byte:02X}>" for byte in "ü-ñ-".encode()))))
    assert (request.text, request.is_finished) == ("", False)  # an unfinished run of bytes
    request.finish(ends)
    assert (request.text, request.finish_reason) == ("ü-", reason)
    assert "".join(piece.text for piece in request.new_pieces()) == "ü-"


@pytest.mark.parametrize(("stop", "text", "result"), [(["b", "z"], "aa", "b"), ("a", "", "a")])
def test_first_stop_string_ends_text(bytes_only: Tokenizer, stop: Any, text: str, result: str) -> None:
    """After a stop string, an error of the grammar is ignored."""
    request = request_for(bytes_only, stop=stop)
    request.constraint = Mock(ended=False, error="It cannot be followed.", **{"advance.side_effect": len})
    assert request.append(step(ids_of(bytes_only, *"aab"))) == len(request.output_ids)
    assert (request.text, request.stop_reason, request.finish_reason) == (text, result, "stop")
    assert "".join(request.output.token_texts) == text
    assert request.error is None


def test_first_token_time_and_decoded_logprobs(bytes_only: Tokenizer) -> None:
    a, b = ids_of(bytes_only, *"ab")
    request = request_for(bytes_only)
    request.append(step([]), logprobs=[])
    assert request.first_token_time is None
    request.append(step([a]), logprobs=[{a: Logprob(-1.0, 1), b: Logprob(-2.0, 2)}])
    at = request.first_token_time
    request.append(step([b]), logprobs=[{b: Logprob(-1.0, 1)}])
    assert request.first_token_time == at
    texts = [[entry.decoded_token for entry in place.values()] for place in request.logprobs]
    assert texts == [["a", "b"], ["b"]]


@pytest.mark.parametrize(("finished", "shown"), [(STOPPED, [7, 8]), (RUNNING, [7, 8, 9])])
def test_grammar_does_not_see_the_stop_token(finished: int, shown: list[int]) -> None:
    request = request_for(None)
    request.constraint = guide = Mock(ended=False, error=None, **{"advance.side_effect": len})
    request.append(step([7, 8, 9], finished))
    guide.advance.assert_called_once_with(shown)
    assert request.output_ids == [7, 8, 9]


def test_finish_reason_and_stop_reason() -> None:
    request = request_for(None)
    request.append(step([1, 2], LENGTH))
    request.finish("abort")  # it has finished before
    assert (request.finish_reason, request.output_ids) == ("length", [1, 2])
    stopped = request_for(None, stop_token_ids=[8, 9])
    stopped.append(step([9, 8], STOPPED))
    assert stopped.stop_reason == 8


def test_logprobs_as_dict() -> None:
    entry = -0.5, 2, [-0.1, -0.5, float("-inf")], [3, 4, 9]
    own, best = (4, Logprob(-0.5, 2)), (3, Logprob(-0.1, 1))
    for n, expected in (0, [own]), (1, [own, best]), (2, [own, best]), (20, [own, best]):
        assert list(logprobs_by_id(4, entry, n).items()) == expected
    assert logprobs_by_id(9, (-7.0, 5, *entry[2:]), 2)[4] == Logprob(-0.5, 2)


@pytest.mark.parametrize(
    ("prompt", "stops", "params", "sentence"),
    [
        ([0] * 7, 0, {}, None),
        ([0] * 8, 0, {}, "8 tokens"),
        ([], 0, {}, "The prompt is empty"),
        ([0], MAX_STOP_IDS, {}, None),
        ([0], MAX_STOP_IDS + 1, {}, f"total {MAX_STOP_IDS + 1} ids, but the limit is {MAX_STOP_IDS}"),
        ([0], 0, {"logit_bias": {4: 1.0}}, "logit_bias contains token id 4; ids are integers from 0 to 3"),
        ([0], 0, {"stop_token_ids": [4]}, "stop_token_ids contains token id 4"),
        ([0], 0, {"acceptance": "exact"}, None),
        ([0], 0, {"acceptance": "typical"}, "requires an engine started with"),
        ([0], 0, {"stop": "a"}, "stop strings and a prediction as text require a tok"),
        ([0, 3], 0, {}, None),
        *[
            ([0, bad], 0, {}, f"The prompt contains token id {bad!r}; ids are integers from 0 to 3.")
            for bad in (True, False, 1.0, "1", 4, -1)
        ],
    ],
)
def test_invalid_requests_are_rejected_with_the_limit(
    prompt: Any, stops: int, params: dict[str, Any], sentence: str | None
) -> None:
    tokenizer = Mock(eos_token_ids=range(stops)) if stops else None
    limits = Limits(EngineConfig(), 4, 8, tokenizer)

    def check() -> None:
        limits.check_prompt(prompt)
        limits.check_params(SamplingParams(**params))

    if sentence is None:
        check()
    else:
        with pytest.raises(ValueError, match=sentence):
            check()


def test_accepted_prediction_tokens_are_counted_once() -> None:
    """The reference starts with the end of the prompt, which does not count."""
    request = Request("r", [1, 2], SamplingParams(prediction=[7, 8, 9]), 0, 9)
    request.reference = np.array([1, 2, 7, 8, 9], np.int32)
    request.draft_sources = [1, FROM_TARGET, *(FROM_REFERENCE - i for i in (1, 2, 2, 4))]
    assert request.completion().num_accepted_prediction_tokens == 2
