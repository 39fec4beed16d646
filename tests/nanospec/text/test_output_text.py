"""Incremental detokenization: pieces join to the text, hold whole characters, and cost little."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.text.output_text import Detokenizer
from nanospec.text.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1, skip: bool = True) -> list[str]:
    """The pieces that come out when `ids` arrive `step` at a time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=200)
@given(data=st.data(), step=st.integers(1, 5), skip=st.booleans())
def test_pieces_of_any_ids_join_to_decode(
    tokenizer: Tokenizer, data: st.DataObject, step: int, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=200)
@given(text=st.text(max_size=40), step=st.integers(1, 3))
def test_pieces_of_text_hold_whole_characters(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, step)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["a b  ab", "é 你好 🤗 👨‍👩‍👧", " \n\t", "  a", "\ufffd a \ufffd"])
def test_pieces_of_chosen_texts_join(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text * 9, add_special_tokens=False)
    for step in (1, 2, 7, len(ids)):
        assert "".join(stream(tokenizer, ids, step)) == tokenizer.decode(ids)


def test_each_token_gives_its_own_text(default: Tokenizer) -> None:
    ids = default.encode("def add(a, b): return 12")
    assert stream(default, ids) == [*(default.decode([i]) for i in ids), ""]


def test_incomplete_character_is_held_back_until_flush(default: Tokenizer) -> None:
    ids = default.encode("🤗")
    assert len(ids) > 1
    detokenizer = Detokenizer(default)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🤗"]
    detokenizer.push(ids[:-1])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(default.encode("ok")) == "ok"  # flush starts anew


def test_special_tokens_are_skipped_or_shown(default: Tokenizer) -> None:
    ids = default.encode("a<|im_end|>b")
    assert "".join(stream(default, ids)) == "ab"
    assert "".join(stream(default, ids, skip=False)) == "a<|im_end|>b"


def test_cost_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    """Whatever arrives, even bytes that never become a character, the window stays short."""
    byte = next((i for i in range(260) if tokenizer.decode([i]) == "\ufffd"), 3)
    for ids in ([byte] * 500, [1] * 500, list(range(min(500, tokenizer.vocab_size)))):
        detokenizer = Detokenizer(tokenizer)
        for i in ids:
            detokenizer.push([i])
            run_of_bytes = i in tokenizer.byte_token_ids
            assert len(detokenizer._window) <= Detokenizer.MAX_WINDOW or run_of_bytes
