"""Tokenizer: encoding, decoding, special tokens, missing and broken files. Incremental detokenization: pieces
join to the text, hold complete characters, and take bounded time."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models

from nanospec.text import files
from nanospec.text.tokenizer import Detokenizer, Tokenizer
from nanospec.text.validation import shown
from tests.conftest import WEIGHTS
from tests.nanospec.text.conftest import byte_fallback, byte_level, save


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer", '{"truncat', "is not a tokenizer .*download"),
        ("tokenizer_config", '{"truncat', "has invalid content .JSONDecodeError.*download"),
        ("generation_config", "[]", ": the content must be a JSON object, not a list"),
        ("generation_config", '{"eos_token_id": "2"}', ": eos_.*='2' must be a token id or a list"),
        ("generation_config", '{"eos_token_id": [true]}', ": eos_.*=.* must be a token id"),
        ("generation_config", '{"eos_token_id": -1}', ": eos_.*=.* must be a token id"),
        ("generation_config", '{"eos_token_id": 2147483648}', ": eos_.*=.* must be a token id"),
    ],
    ids=shown,
)
def test_broken_file_is_rejected(tmp_path: Path, name: str, content: str, words: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{name}\.json{words}|{name}\.json {words}") as caught:
        Tokenizer(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400


def test_missing_inconsistent_or_large_file_is_rejected(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; save"):
        Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="it has no tokens"):
        Tokenizer(save(tokenizers.Tokenizer(models.BPE()), tmp_path))
    path = save(byte_level(), tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"] = {}  # `encode` would panic, which is not an Exception
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer .*; download it again"):
        Tokenizer(tmp_path)
    save(byte_level(), tmp_path)
    monkeypatch.setattr(files, "MAX_FILE", path.stat().st_size)
    assert Tokenizer(tmp_path).vocab_size == 265
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer\.json is larger than 0 MiB, the limit"):
        Tokenizer(tmp_path)


def test_special_tokens(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    plain = Tokenizer(save(backend, tmp_path / "plain"))
    assert (plain.name, plain.eos_token_ids, plain.special_token_ids) == ("plain", (), {0, 1})
    assert plain.vocab_size == 2 + 256 + 6 + 1  # including those of `add_tokens`
    assert plain.decode(plain.encode("x<call>")) == "x<call>"  # added, but not special
    assert len(plain.encode("abcdefgh")) == 9  # BOS included; neither truncated nor padded
    assert plain.encode_prompt("<call>" * 2, 2, add_special_tokens=False) == [264, 264]
    with pytest.raises(ValueError, match="The prompt has 13 characters, too many for max_model_len=2"):
        plain.encode_prompt("<call>" * 2 + "a", 2)
    ends: dict[str, dict[str, Any]] = {
        "generation_config": {"eos_token_id": [7, 5]},
        "config": {"eos_token_id": 5},
        "tokenizer_config": {"eos_token": {"content": "</s>"}, "bos_token": None},
    }
    assert Tokenizer(save(byte_level(), tmp_path / "ends", **ends)).eos_token_ids == (7, 5, 1)


def test_text_of_token(tmp_path: Path, default: Tokenizer) -> None:
    """The text keeps the space that some tokenizers drop at the start of a text."""
    spaces = Tokenizer(save(byte_fallback(), tmp_path))
    assert [spaces.text_of(i) for i in (1, 259, 261, 263, 264)] == ["<s>", " ", "a", " a", "ab"]
    ids = default.encode("🤗")[0], *default.encode("<|im_end|> x")
    assert [default.text_of(i) for i in ids] == ["\ufffd", "<|im_end|>", " x"]


@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", pytest.param("qwen2.5-coder-1.5b-instruct", marks=pytest.mark.model2)]
)
def test_ids_and_chat_match_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not (folder := WEIGHTS / name).is_dir():
        pytest.skip(f"needs {name}: nanospec fetch {name}")
    tokenizer, reference = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("It's 2024, ISN'T it?", "  x\r\n\n\ty = 3.1", "naïve cafe\u0301 你好 🤗", "<|im_end|>x", ""):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    options: dict[str, Any] = {"tools": tools} if "qwen" in name else {}
    chat = [{"role": role, "content": "é"} for role in ("user", "assistant", "user")]
    for prompt in (True, False):
        wanted = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **options)
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, **options) == wanted
    wanted = reference.apply_chat_template(chat[:2], tokenize=False, continue_final_message=True, **options)
    assert tokenizer.apply_chat_template(chat[:2], **options) == wanted
    assert tokenizer.eos_token_ids[0] == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1, skip: bool = True) -> list[str]:
    """Return the pieces when `ids` arrive `step` at a time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=60)
@given(text=st.text(max_size=40), step=st.integers(1, 3))
@example("a b  ab" * 9, 1)
@example("é 你好 🤗 👨‍👩‍👧" * 9, 1)
@example("\ufffd a \ufffd" * 9, 2)
def test_pieces_have_whole_characters(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, pieces = tokenizer.decode(ids), stream(tokenizer, ids, step)
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60)
@given(data=st.data(), step=st.integers(1, 5), skip=st.booleans())
def test_pieces_of_any_ids_join(tokenizer: Tokenizer, data: st.DataObject, step: int, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


def test_text_is_returned_as_soon_as_it_is_final(default: Tokenizer) -> None:
    ids = default.encode("def add(a, b): return 12")
    assert stream(default, ids) == [*(default.decode([i]) for i in ids), ""]
    ids, detokenizer = default.encode("🤗"), Detokenizer(default)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🤗"]
    detokenizer.push(ids[:-1])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(default.encode("ok")) == "ok"  # flush resets the state


def test_cost_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    """The window stays short for all ids, even bytes that never form a character."""
    byte = next(i for i in range(260) if tokenizer.decode([i]) == "\ufffd")
    for ids in ([byte] * 200, [1] * 200, list(range(min(500, tokenizer.vocab_size)))):
        detokenizer = Detokenizer(tokenizer)
        for i in ids:
            detokenizer.push([i])
            assert len(detokenizer._window) <= Detokenizer.MAX_WINDOW or i in tokenizer.byte_token_ids
