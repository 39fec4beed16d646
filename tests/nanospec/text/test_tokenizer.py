"""Tokenizer, chat templates and incremental detokenization.

The detokenizer is tested on three small tokenizers of different kinds (byte-level as in GPT-2,
byte fallback as in Llama 2, plain Metaspace) and on the default model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from nanospec.text.tokenizer import Detokenizer, Tokenizer

SMOLLM2 = Path(__file__).resolve().parents[3] / "weights" / "smollm2-135m-instruct"
TEMPLATE = (
    "{{ bos_token }}\n{% for m in messages %}[{{ m['role'] }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """256 bytes, a few merges that cut through UTF-8 characters, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "he"), ("Ġhe", "ll"), ("ð", "Ł"), ("ł", "Ġ")]
    texts = ["<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<call>"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Pieces with a leading ▁ for a space, and byte tokens for what they lack."""
    pieces = ["▁", "▁▁", "a", "b", "▁a", "ab", "é", "▁ab"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b"), ("▁", "ab")]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As `byte_fallback`, but without bytes and with the Metaspace decoder."""
    texts = ["<unk>", "<s>", "▁", "a", "b", "▁a", "▁b", "ab", "\ufffd", "é"]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


def save(backend: tokenizers.Tokenizer, folder: Path, **configs: dict[str, Any]) -> Path:
    """Write a model folder without weights; `configs` are its JSON files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
}


@pytest.fixture(scope="module", params=[*KINDS, "smollm2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    if request.param == "smollm2":
        return smollm2_tokenizer()
    return Tokenizer(save(KINDS[request.param](), tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return smollm2_tokenizer()


def smollm2_tokenizer() -> Tokenizer:
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip(f"{SMOLLM2} is missing; nanospec fetch {SMOLLM2.name}")
    return Tokenizer(SMOLLM2)


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1, skip: bool = True) -> list[str]:
    """The pieces that come out when `ids` arrive `step` at a time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


# --- Detokenizer ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data(), step=st.integers(1, 5), skip=st.booleans())
def test_pieces_of_any_ids_join_to_decode(
    tokenizer: Tokenizer, data: st.DataObject, step: int, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
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


def test_each_token_gives_its_own_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("def add(a, b): return 12")
    assert stream(smollm2, ids) == [*(smollm2.decode([i]) for i in ids), ""]


def test_incomplete_character_is_held_back_until_flush(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🤗")
    assert len(ids) > 1
    detokenizer = Detokenizer(smollm2)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🤗"]
    detokenizer.push(ids[:-1])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(smollm2.encode("ok")) == "ok"  # flush starts anew


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b")
    assert "".join(stream(smollm2, ids)) == "ab"
    assert "".join(stream(smollm2, ids, skip=False)) == "a<|im_end|>b"


def test_cost_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    """Whatever arrives, even bytes that never become a character, the window stays short."""
    byte = next((i for i in range(260) if tokenizer.decode([i]) == "\ufffd"), 3)
    for ids in ([byte] * 500, [1] * 500, list(range(min(500, tokenizer.vocab_size)))):
        detokenizer = Detokenizer(tokenizer)
        for i in ids:
            detokenizer.push([i])
            run_of_bytes = i in tokenizer._byte_ids
            assert len(detokenizer._window) <= Detokenizer.MAX_WINDOW or run_of_bytes


# --- Tokenizer -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=0x3FFFF)))
def test_byte_level_round_trip(smollm2: Tokenizer, text: str) -> None:
    """Without rare bytes that SmolLM2 has no token for: control characters, 0xF1 and above."""
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_text_that_is_not_unicode_is_one_sentence(smollm2: Tokenizer) -> None:
    with pytest.raises(ValueError, match="holds U\\+D83E, half of a surrogate pair"):
        smollm2.encode("a\ud83e")


def test_missing_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; .* save"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "config"])
def test_broken_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / f"{name}.json").write_text('{"truncat')
    with pytest.raises(ValueError, match=rf"{name}\.json is (not|no) .*fetch"):
        Tokenizer(tmp_path)


def test_end_tokens_come_from_all_files_in_order(tmp_path: Path) -> None:
    folder = save(
        byte_level(),
        tmp_path,
        generation_config={"eos_token_id": [7, 5]},
        config={"eos_token_id": 5, "bos_token_id": 0},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_token_ids == (7, 5, 1)
    assert tokenizer.bos_token_id == 0


def test_model_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == ()


def test_truncation_of_the_file_is_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    tokenizer = Tokenizer(save(backend, tmp_path))
    assert len(tokenizer.encode("abcdefgh")) == 9  # BOS included


def test_vocab_size_counts_added_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    assert tokenizer.vocab_size == 2 + 256 + 6 + 1
    assert tokenizer.decode(tokenizer.encode("x<call>")) == "x<call>"  # added, but not special
    assert tokenizer.special_token_ids == {0, 1}


# --- Chat templates ------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, template: Any, **files: str) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    save(byte_level(), folder, tokenizer_config=config)
    for name, content in files.items():
        (folder / f"{name}.jinja").write_text(content)
    return Tokenizer(folder)


def test_template_in_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    assert tokenizer.apply_chat_template(HI) == "<s>\n[user] hi[assistant]"
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=False) == "<s>\n[user] hi"


def test_template_file_wins(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE, chat_template="{{ messages | length }}{{ x }}")
    assert tokenizer.apply_chat_template(HI, x="!") == "1!"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = with_template(tmp_path, named)
    assert tokenizer.apply_chat_template(HI) == "D"
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "T"
    assert tokenizer.apply_chat_template(HI, chat_template="tool_use") == "T"


def test_rendered_chat_has_one_bos(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    text = tokenizer.apply_chat_template(HI)
    assert tokenizer.encode(text, add_special_tokens=False).count(0) == 1
    assert tokenizer.encode("hi").count(0) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("  {% if true %}\nx{% endif %}", "x"),
        ("{{ tools is none }}{{ pad_token is defined }}", "TrueFalse"),
    ],
    ids=["tojson", "strftime_now", "loopcontrols", "generation", "blocks-trimmed", "variables"],
)
def test_template_features(tmp_path: Path, template: str, text: str) -> None:
    assert with_template(tmp_path, template).apply_chat_template(HI) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 + 'a' }}",
    ],
    ids=["raise_exception", "syntax", "immutable", "sandbox", "type"],
)
def test_template_errors_are_one_sentence(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses these messages: "):
        with_template(tmp_path, template).apply_chat_template(HI)


def test_model_without_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template 'default' .*plain prompt"):
        Tokenizer(save(byte_level(), tmp_path)).apply_chat_template(HI)


# --- The default model beside transformers -------------------------------------------------------


def test_same_ids_and_chat_as_transformers(smollm2: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    for text in ("It's 2024, isn't it?", "  x\n\n\ty = 3.1", "naïve 你好 🤗", "<|im_end|>x", ""):
        assert smollm2.encode(text) == reference(text)["input_ids"]
    assert smollm2.encode("12 345", False) == [33, 34, 216, 35, 36, 37]  # digits stand alone
    chat = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é"}]
    for prompt in (True, False):
        assert smollm2.apply_chat_template(chat, prompt) == reference.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt
        )
    assert smollm2.eos_token_ids[0] == reference.eos_token_id == 2
    assert smollm2.vocab_size == len(reference) == 49152


@pytest.mark.model2
def test_second_model_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = SMOLLM2.parent / "qwen2.5-coder-1.5b-instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{folder} is missing; nanospec fetch {folder.name}")
    tokenizer, reference = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("I'LL 2024\r\n\n  x", "cafe\u0301 你好 🤗", "<tool_call>{}</tool_call><|im_end|>"):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    assert tokenizer.apply_chat_template(HI, tools=tools) == reference.apply_chat_template(
        HI, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.eos_token_ids == (151645, 151643)
