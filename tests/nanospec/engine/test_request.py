"""What a request makes of a step's tokens, where the engine's tests do not reach."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nanospec.config import EngineConfig, SamplingParams
from nanospec.device.orders import as_dict
from nanospec.engine.request import Limits, Request, check_request, seed_of
from nanospec.kernels import LENGTH, MAX_STOP_IDS, OWN, RUNNING, STOPPED
from nanospec.kernels.speculation.report import RowReport
from nanospec.outputs import Logprob, Piece
from nanospec.text import as_int
from nanospec.text.chat import as_list
from nanospec.text.tokenizer import OutputText, Tokenizer
from tests.nanospec.text.conftest import byte_fallback


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with byte tokens, whose runs are decoded when they end."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_fallback().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def request_for(tokenizer: Tokenizer | None, **params: object) -> Request:
    asked = SamplingParams(**params)  # type: ignore[arg-type]
    output = OutputText(tokenizer, asked.stop, asked.min_tokens)
    return Request(id="a", prompt_ids=[5], params=asked, seed=0, max_len=99, output=output)


def step(tokens: list[int], finished: int = RUNNING, accepted: int = 0, source: int = -1) -> RowReport:
    sources = [source + i if i < accepted and source >= 0 else OWN for i in range(len(tokens))]
    return RowReport(tokens, accepted, accepted, 0, 0, finished, sources)


@pytest.mark.parametrize(("ends", "reason"), [("length", "stop"), ("abort", "abort")])
def test_a_stop_string_in_text_held_back_to_the_end_is_cut_too(
    bytes_only: Tokenizer, ends: str, reason: str
) -> None:
    vocab = bytes_only.backend.get_vocab()
    ids = [vocab[f"<0x{byte:02X}>"] for byte in "ü-ñ-".encode()]
    request = request_for(bytes_only, stop="ñ")
    request.append(step(ids))
    assert (request.text, request.is_finished) == ("", False)  # a run of bytes, not ended yet
    request.finish(ends)
    assert (request.text, request.finish_reason) == ("ü-", reason)
    assert "".join(piece.text for piece in request.new_pieces()) == "ü-"


@pytest.mark.parametrize(("stop", "text", "found"), [(["b", "z"], "aa", "b"), ("a", "", "a")])
def test_one_of_several_stop_strings_ends_the_text_and_so_does_one_it_begins_with(
    bytes_only: Tokenizer, stop: Any, text: str, found: str
) -> None:
    vocab = bytes_only.backend.get_vocab()
    request = request_for(bytes_only, stop=stop)
    assert request.append(step([vocab[piece] for piece in "aab"])) == len(request.output_ids)
    assert (request.text, request.stop_reason, request.finish_reason) == (text, found, "stop")
    assert "".join(request.output.token_texts) == text


def test_the_first_token_has_one_time_and_log_probabilities_have_texts(bytes_only: Tokenizer) -> None:
    a, b = (bytes_only.backend.get_vocab()[piece] for piece in "ab")
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
def test_a_grammar_sees_all_tokens_but_the_one_that_ended_the_request(
    finished: int, shown: list[int]
) -> None:
    guide = Mock(ended=False, error=None, **{"advance.side_effect": len})
    request = request_for(None)
    request.constraint = guide
    request.append(step([7, 8, 9], finished))
    guide.advance.assert_called_once_with(shown)
    assert request.output_ids == [7, 8, 9]


def test_drafts_that_were_copied_from_nowhere_have_no_source(bytes_only: Tokenizer) -> None:
    a = bytes_only.backend.get_vocab()["a"]
    request = request_for(bytes_only)
    request.append(step([a, a, a], accepted=2, source=-1))
    request.append(step([a, a, a], accepted=2, source=1))
    assert request.draft_sources == [-1, -1, -1, 1, 2, -1]
    assert request.new_pieces()[-3:] == [Piece("a", 1), Piece("a", 2), Piece("a", -1)]


def test_a_finished_request_stays_as_it_ended() -> None:
    request = request_for(None)
    request.append(step([1, 2], LENGTH))
    request.finish("abort")
    assert request.finish_reason == "length"
    assert request.output_ids == [1, 2]


def test_the_token_that_ended_a_request_is_named() -> None:
    request = request_for(None, stop_token_ids=[8, 9])
    request.append(step([9, 8], STOPPED))
    assert request.stop_reason == 8
    assert request.first_token_time is not None
    assert request.finish_time is not None
    assert request.finish_time >= request.first_token_time


def test_block_names_follow_the_tokens_and_the_salt() -> None:
    plain, salted = request_for(None), request_for(None)
    salted.salt = b"other"
    for request in (plain, salted):
        request.append(step(list(range(40))))
    assert len(plain.hashes(16)) == 2
    assert not set(plain.hashes(16)) & set(salted.hashes(16))
    other = request_for(None)
    other.append(step([9, *range(1, 40)]))
    assert plain.hashes(16)[1] != other.hashes(16)[1], "a name covers all blocks before"
    before = list(plain.hashes(16))
    plain.append(step([7] * 7))
    assert plain.hashes(16)[:2] == before
    assert len(plain.hashes(16)) == 3


def test_seeds_fit_64_bits_and_are_as_asked_for_the_first_output() -> None:
    step = 0x9E3779B97F4A7C15
    lowest, highest = -(2**63), 2**63 - 1
    assert [seed_of(seed, 0, 9) for seed in (lowest, -1, 0, 7, highest)] == [lowest, -1, 0, 7, highest]
    assert [seed_of(0, index, 9) for index in (1, 2, 3)] == [step - 2**64, 2 * step - 2**64, 3 * step - 2**65]
    assert [seed_of(None, 5, number) for number in (1, 2)] == [step - 2**64, 2 * step - 2**64]


def test_log_probabilities_by_token_begin_with_its_own_and_leave_out_what_cannot_come() -> None:
    entry = -0.5, 2, [-0.1, -0.5, float("-inf")], [3, 4, 9]
    own, best = (4, Logprob(-0.5, 2)), (3, Logprob(-0.1, 1))
    assert [list(as_dict(4, entry, n).items()) for n in (0, 1, 2)] == [[own], [own, best], [own, best]]
    assert list(as_dict(4, entry, 20).items()) == [own, best]
    assert as_dict(9, (-7.0, 5, *entry[2:]), 2)[4] == Logprob(-0.5, 2)


@pytest.mark.parametrize(
    ("prompt", "stops", "params", "sentence"),
    [
        (7, 0, {}, None),
        (8, 0, {}, "8 tokens"),
        (0, 0, {}, "The prompt is empty"),
        (1, MAX_STOP_IDS, {}, None),
        (1, MAX_STOP_IDS + 1, {}, f"are {MAX_STOP_IDS + 1} ids, but the limit is {MAX_STOP_IDS}"),
        (1, 0, {"logit_bias": {4: 1.0}}, "logit_bias holds token id 4; ids are integers from 0 to 3"),
        (1, 0, {"acceptance": "exact"}, None),
        (1, 0, {"acceptance": "typical"}, "needs an engine started with"),
        (1, 0, {"stop": "a"}, "stop strings need a tokenizer"),
    ],
)
def test_what_an_engine_cannot_run(
    prompt: int, stops: int, params: dict[str, Any], sentence: str | None
) -> None:
    tokenizer = Mock(eos_token_ids=range(stops)) if stops else None
    limits = Limits(EngineConfig(), 4, 8, tokenizer)
    asked = [0] * prompt, SamplingParams(**params), limits
    if sentence is None:
        check_request(*asked)
    else:
        with pytest.raises(ValueError, match=sentence):
            check_request(*asked)


@pytest.mark.parametrize("bad", [True, False, 1.0, "1", 9, -1])
def test_a_prompt_holds_integers_of_the_vocabulary(bad: object) -> None:
    limits = Limits(EngineConfig(), 9, 8, None)
    check_request([1, 8], SamplingParams(), limits)
    with pytest.raises(ValueError, match=f"The prompt holds token id {bad!r}; ids are integers from 0 to 8."):
        check_request([1, bad], SamplingParams(), limits)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([True, 2.5], [[True, 2.5]]),  # one bad prompt, refused later, with a sentence
        ([[1], "a"], [[1], "a"]),
        ([], []),
    ],
    ids=str,
)
def test_one_prompt_or_several(given: Any, prompts: list[Any]) -> None:
    assert as_list(given) == prompts


def test_a_prompt_may_be_an_array() -> None:
    ids: Any = np.array([3, 4])
    assert len(as_list(ids)) == 1
    assert [type(as_int(t)) for t in ids] == [int, int]
    assert [as_int(t) for t in (True, 1.0, "1")] == [True, 1.0, "1"]


def test_who_has_ended_at_a_stop_string_has_no_error_of_what_was_to_follow(bytes_only: Tokenizer) -> None:
    a, b = (bytes_only.backend.get_vocab()[piece] for piece in "ab")
    request = request_for(bytes_only, stop="b")
    request.constraint = Mock(ended=False, error="It cannot be followed.", **{"advance.side_effect": len})
    request.append(step([a, b]))
    assert (request.text, request.finish_reason, request.error) == ("a", "stop", None)
