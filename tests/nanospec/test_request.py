"""What a request makes of a step's tokens, where the engine's tests do not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nanospec.checks import as_token_id
from nanospec.config import SamplingParams
from nanospec.kernels.codes import LENGTH, OWN, RUNNING
from nanospec.kernels.speculation.report import RowReport
from nanospec.prompts import as_list
from nanospec.request import Limits, Piece, Request, Status, check_request
from nanospec.text.detokenize import Detokenizer
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.text.conftest import byte_fallback


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with byte tokens, whose runs are decoded when they end."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_fallback().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def request_for(tokenizer: Tokenizer | None, **params: object) -> Request:
    return Request(
        id="a",
        prompt_ids=[5],
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        max_len=99,
        detokenizer=Detokenizer(tokenizer) if tokenizer else None,
    )


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
    assert (request.text, request.status) == ("", Status.WAITING)  # a run of bytes, not ended yet
    request.finish(ends)
    assert (request.text, request.finish_reason) == ("ü-", reason)
    assert "".join(piece.text for piece in request.new_pieces()) == "ü-"


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


def test_block_names_follow_the_tokens_and_the_salt() -> None:
    plain, salted = request_for(None), request_for(None)
    salted.salt = b"other"
    for request in (plain, salted):
        request.append(step(list(range(40))))
    assert len(plain.hashes(16)) == 2
    assert not set(plain.hashes(16)) & set(salted.hashes(16))
    before = list(plain.hashes(16))
    plain.append(step([7] * 7))
    assert plain.hashes(16)[:2] == before
    assert len(plain.hashes(16)) == 3


@pytest.mark.parametrize("bad", [True, False, 1.0, "1", 9, -1])
def test_a_prompt_holds_integers_of_the_vocabulary(bad: object) -> None:
    limits = Limits(vocab_size=9, max_model_len=8, has_text=False, acceptance="exact")
    check_request([1, 8], SamplingParams(), (), limits)
    with pytest.raises(ValueError, match=f"The prompt holds token id {bad!r}; ids are integers from 0 to 8."):
        check_request([1, bad], SamplingParams(), (), limits)  # type: ignore[list-item]


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
    assert [type(as_token_id(t)) for t in ids] == [int, int]
    assert [as_token_id(t) for t in (True, 1.0, "1")] == [True, 1.0, "1"]
