"""Tokenizer: encoding, decoding, special tokens, missing and broken files. Incremental detokenization: pieces
join to the text, hold complete characters, and take bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from nanospec.text import shown
from nanospec.text.tokenizer import Detokenizer, Tokenizer
from tests.conftest import WEIGHTS
from tests.nanospec.text.conftest import byte_level, save

HI = [{"role": "user", "content": "hi"}]


@settings(max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=0x3FFFF)))
def test_byte_level_round_trip(default: Tokenizer, text: str) -> None:
    """Excludes bytes for which SmolLM2 has no token: control characters, 0xF1 and above."""
    assert default.decode(default.encode(text), skip_special_tokens=False) == text


def test_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; save"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer", '{"truncat', "is not a tokenizer .*download"),
        ("tokenizer_config", '{"truncat', "is not valid JSON .*download"),
        ("generation_config", "[]", "must be a JSON object, not a list"),
        ("config", "null", "must be a JSON object, not a NoneType"),
    ],
)
def test_broken_file_is_reported(tmp_path: Path, name: str, content: str, words: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{name}\.json {words}"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("ids", ["2", 2.5, {}, [None], [[2]], -1, 2**31, True, ["x" * 1000]], ids=shown)
def test_invalid_eos_token_ids_are_rejected(tmp_path: Path, ids: Any) -> None:
    folder = save(byte_level(), tmp_path, generation_config={"eos_token_id": ids})
    with pytest.raises(ValueError, match=r"config\.json: eos_.* must be a token id or a list") as caught:
        Tokenizer(folder)
    assert len(str(caught.value)) < len(str(folder)) + 400


def test_inconsistent_tokenizer_is_rejected(tmp_path: Path) -> None:
    """Otherwise each `encode` would panic, which is not an Exception."""
    save(byte_level(), tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer .*; download it again"):
        Tokenizer(tmp_path)


def test_tokenizer_without_tokens_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no tokens"):
        Tokenizer(save(tokenizers.Tokenizer(models.BPE()), tmp_path))


def test_eos_token_ids_come_from_all_files(tmp_path: Path) -> None:
    folder = save(
        byte_level(),
        tmp_path,
        generation_config={"eos_token_id": [7, 5]},
        config={"eos_token_id": 5},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_token_ids == (7, 5, 1)


def test_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    tokenizer = Tokenizer(save(backend, tmp_path))
    assert len(tokenizer.encode("abcdefgh")) == 9  # BOS included


def test_vocab_size_counts_added_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.vocab_size == 2 + 256 + 6 + 1
    assert tokenizer.decode(tokenizer.encode("x<call>")) == "x<call>"  # added, but not special
    assert tokenizer.special_token_ids == {0, 1}


def test_ids_and_chat_match_transformers(default: Tokenizer, smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in ("It's 2024, isn't it?", "  x\n\n\ty = 3.1", "naïve 你好 🤗", "<|im_end|>x", ""):
        assert default.encode(text) == reference(text)["input_ids"]
    assert default.encode("12 345", False) == [33, 34, 216, 35, 36, 37]  # digits are separate tokens
    chat = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é"}]
    for prompt in (True, False):
        assert default.apply_chat_template(chat, prompt) == reference.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt
        )
    assert default.eos_token_ids[0] == reference.eos_token_id == 2
    assert default.vocab_size == len(reference) == 49152


@pytest.mark.model2
def test_second_model_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = WEIGHTS / "qwen2.5-coder-1.5b-instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"needs {folder.name}: python tests/second_model.py")
    tokenizer, reference = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("I'LL 2024\r\n\n  x", "cafe\u0301 你好 🤗", "<tool_call>{}</tool_call><|im_end|>"):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    assert tokenizer.apply_chat_template(HI, tools=tools) == reference.apply_chat_template(
        HI, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.eos_token_ids == (151645, 151643)


# ---- one output while its tokens arrive ---------------------------------------------------------------


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1, skip: bool = True) -> list[str]:
    """Return the pieces when `ids` arrive `step` at a time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=200)
@given(data=st.data(), step=st.integers(1, 5), skip=st.booleans())
def test_pieces_of_any_ids_join_to_text(
    tokenizer: Tokenizer, data: st.DataObject, step: int, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=200)
@given(text=st.text(max_size=40), step=st.integers(1, 3))
def test_pieces_have_whole_characters(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, step)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["a b  ab", "é 你好 🤗 👨‍👩‍👧", " \n\t", "  a", "\ufffd a \ufffd"])
def test_pieces_of_selected_texts_join(tokenizer: Tokenizer, text: str) -> None:
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
    assert detokenizer.push(default.encode("ok")) == "ok"  # flush resets the state


def test_special_tokens_are_skipped_or_shown(default: Tokenizer) -> None:
    ids = default.encode("a<|im_end|>b")
    assert "".join(stream(default, ids)) == "ab"
    assert "".join(stream(default, ids, skip=False)) == "a<|im_end|>b"


def test_cost_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    """The window stays short for all ids, even bytes that never form a character."""
    byte = next((i for i in range(260) if tokenizer.decode([i]) == "\ufffd"), 3)
    for ids in ([byte] * 500, [1] * 500, list(range(min(500, tokenizer.vocab_size)))):
        detokenizer = Detokenizer(tokenizer)
        for i in ids:
            detokenizer.push([i])
            run_of_bytes = i in tokenizer.byte_token_ids
            assert len(detokenizer._window) <= Detokenizer.MAX_WINDOW or run_of_bytes
