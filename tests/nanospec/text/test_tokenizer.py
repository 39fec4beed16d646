"""Tokenizer: encoding, decoding, special tokens, missing and broken files. Incremental detokenization: pieces
join to the text, hold complete characters, and take bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models

from nanospec import text as texts
from nanospec.text import shown
from nanospec.text.tokenizer import Detokenizer, Tokenizer
from tests.conftest import WEIGHTS
from tests.nanospec.text.conftest import byte_level, metaspace, save

HI = [{"role": "user", "content": "hi"}]
BAD_ENDS: list[Any] = ["2", 2.5, {}, [None], [[2]], -1, 2**31, True, ["x" * 1000]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer", '{"truncat', "is not a tokenizer .*download"),
        ("tokenizer_config", '{"truncat', "is not valid JSON .*download"),
        ("generation_config", "[]", "must be a JSON object, not a list"),
        ("config", "null", "must be a JSON object, not a NoneType"),
        *(
            (
                "generation_config",
                json.dumps({"eos_token_id": ids}),
                ": eos_.*=.* must be a token id or a list",
            )
            for ids in BAD_ENDS
        ),
    ],
    ids=shown,
)
def test_broken_file_is_rejected(tmp_path: Path, name: str, content: str, words: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{name}\.json{words}|{name}\.json {words}") as caught:
        Tokenizer(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400


def test_missing_large_or_inconsistent_tokenizer_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; save"):
        Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="it has no tokens"):
        Tokenizer(save(tokenizers.Tokenizer(models.BPE()), tmp_path))
    path = save(byte_level(), tmp_path) / "tokenizer.json"
    monkeypatch.setattr(texts, "MAX_FILE", path.stat().st_size)
    assert Tokenizer(tmp_path).vocab_size == 265
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"] = {}  # `encode` would panic, which is not an Exception
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer .*; download it again"):
        Tokenizer(tmp_path)
    monkeypatch.setattr(texts, "MAX_FILE", (1 << 20) - 1)
    path.write_text(" " * (1 << 20))
    with pytest.raises(ValueError, match=r"tokenizer\.json is larger than 0 MiB, the limit"):
        Tokenizer(tmp_path)


def test_special_tokens(tmp_path: Path) -> None:
    plain = Tokenizer(save(byte_level(), tmp_path / "plain"))
    assert plain.name == "plain"
    assert plain.eos_token_ids == ()
    assert plain.vocab_size == 2 + 256 + 6 + 1  # including those of `add_tokens`
    assert plain.special_token_ids == {0, 1}
    assert plain.decode(plain.encode("x<call>")) == "x<call>"  # added, but not special
    ends: dict[str, dict[str, Any]] = {
        "generation_config": {"eos_token_id": [7, 5]},
        "config": {"eos_token_id": 5},
        "tokenizer_config": {"eos_token": {"content": "</s>"}, "bos_token": None},
    }
    assert Tokenizer(save(byte_level(), tmp_path / "ends", **ends)).eos_token_ids == (7, 5, 1)


def test_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer(save(backend, tmp_path))
    assert len(tokenizer.encode("abcdefgh")) == 9  # BOS included


def test_text_of_token(tmp_path: Path, default: Tokenizer) -> None:
    """It keeps the space that some tokenizers drop at the start of a text."""
    spaces = Tokenizer(save(metaspace(), tmp_path))
    assert [spaces.text_of(i) for i in (1, 2, 3, 5, 7)] == ["<s>", " ", "a", " a", "ab"]
    first_byte = default.encode("🤗")[0]
    assert [default.text_of(i) for i in (first_byte, *default.encode("<|im_end|> x"))] == [
        "\ufffd",
        "<|im_end|>",
        " x",
    ]


def test_longest_prompt_is_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    assert tokenizer.encode_prompt("<call>" * 2, 2, add_special_tokens=False) == [264, 264]
    with pytest.raises(ValueError, match="The prompt has 13 characters, too many for max_model_len=2"):
        tokenizer.encode_prompt("<call>" * 2 + "a", 2)
    with pytest.raises(ValueError, match=r"the text has an unpaired surrogate, '\\ud800'\."):
        tokenizer.encode("a\ud800")


def matches_transformers(
    folder: Path, sentences: list[str], chat: list[dict[str, str]], **options: Any
) -> Tokenizer:
    """Check that ids and prompts equal those of transformers, and return the tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizer, reference = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in sentences:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    for prompt in (True, False):
        assert tokenizer.apply_chat_template(chat, prompt, **options) == reference.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt, **options
        )
    assert tokenizer.eos_token_ids[0] == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)
    return tokenizer


def test_ids_and_chat_match_transformers(smollm2: Path) -> None:
    chat = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é"}]
    sentences = ["It's 2024, isn't it?", "  x\n\n\ty = 3.1", "naïve 你好 🤗", "<|im_end|>x", ""]
    tokenizer = matches_transformers(smollm2, sentences, chat)
    assert tokenizer.encode("12 345", False) == [33, 34, 216, 35, 36, 37]  # digits are separate tokens


@pytest.mark.model2
def test_second_model_matches_transformers() -> None:
    folder = WEIGHTS / "qwen2.5-coder-1.5b-instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"needs {folder.name}: python tests/second_model.py")
    sentences = ["I'LL 2024\r\n\n  x", "cafe\u0301 你好 🤗", "<tool_call>{}</tool_call><|im_end|>"]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    assert matches_transformers(folder, sentences, HI, tools=tools).eos_token_ids == (151645, 151643)


# ---- one output while its tokens arrive ---------------------------------------------------------------


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1, skip: bool = True) -> list[str]:
    """Return the pieces when `ids` arrive `step` at a time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=60)
@given(data=st.data(), step=st.integers(1, 5), skip=st.booleans())
def test_pieces_of_any_ids_join_to_text(
    tokenizer: Tokenizer, data: st.DataObject, step: int, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=60)
@given(text=st.text(max_size=40), step=st.integers(1, 3))
@example("a b  ab" * 9, 1)
@example("é 你好 🤗 👨‍👩‍👧" * 9, 1)
@example("é 你好 🤗 👨‍👩‍👧" * 9, 7)
@example(" \n\t" * 9, 2)
@example("  a" * 9, 1)
@example("\ufffd a \ufffd" * 9, 2)
def test_pieces_have_whole_characters(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, step)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_returned_as_soon_as_it_is_final(default: Tokenizer) -> None:
    ids = default.encode("def add(a, b): return 12")
    assert stream(default, ids) == [*(default.decode([i]) for i in ids), ""]
    ids, detokenizer = default.encode("🤗"), Detokenizer(default)
    assert len(ids) > 1
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🤗"]
    detokenizer.push(ids[:-1])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(default.encode("ok")) == "ok"  # flush resets the state
    special = default.encode("a<|im_end|>b")
    assert "".join(stream(default, special)) == "ab"
    assert "".join(stream(default, special, skip=False)) == "a<|im_end|>b"


def test_cost_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    """The window stays short for all ids, even bytes that never form a character."""
    byte = next((i for i in range(260) if tokenizer.decode([i]) == "\ufffd"), 3)
    for ids in ([byte] * 200, [1] * 200, list(range(min(500, tokenizer.vocab_size)))):
        detokenizer = Detokenizer(tokenizer)
        for i in ids:
            detokenizer.push([i])
            run_of_bytes = i in tokenizer.byte_token_ids
            assert len(detokenizer._window) <= Detokenizer.MAX_WINDOW or run_of_bytes
