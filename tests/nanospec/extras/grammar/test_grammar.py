"""Grammars as masks: allowed tokens, drafts, and lookahead without side effects."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nanospec.extras.grammar.grammar as grammar
from nanospec.config import SamplingParams
from nanospec.extras.grammar.grammar import FORCED, Grammars, Guide, look_up
from nanospec.kernels import GENERATED
from nanospec.kernels.speculation import ngram
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.extras.grammar.guided import FORMATS, SCHEMA, VOCAB
from tests.tiny import tiny_tokenizer

OBJECT = {"type": "json_object"}
SPECIAL_TEXTS = ["a.*", "b|c", "d\ne", "-~/\\^$#& é", "ab", "abab", 'a"\\\n', "é\x00\u2028😀"]
# More choices than the parser's limit.
MANY_CHOICES = {"type": "choice", "choice": [*SPECIAL_TEXTS, *SPECIAL_TEXTS, *map(str, range(3000))]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": of}}


def allowed(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def masks_of(guide: Guide) -> bytes:
    return guide.plan([1], 0, 1, 4).masks[0]


def accepts(grammars: Grammars, fmt: dict[str, Any], tokens: Sequence[int]) -> bool:
    """Return whether the grammar allows these tokens in sequence, followed by EOS."""
    guide = grammars.guide(fmt)
    for token in tokens:
        if guide.ended or token not in allowed(masks_of(guide)):
            return False
        guide.advance([token])
    return guide.ended or 0 in allowed(masks_of(guide))


@settings(max_examples=200)
@given(st.lists(st.sampled_from((0, 1, 65536, 0xD800, 0xDC00)), max_size=40), st.integers(1, 4))
def test_lookup_matches_ngram_kernel(text: list[int], least: int) -> None:
    """Include ids that are surrogates in UTF-16."""
    starts, n = ngram.matches(torch.tensor(text, dtype=torch.int32), least, 5)
    assert look_up(np.array(text, np.int32), least, 5) == ((int(starts[0]), n) if n else (-1, 0))


@settings(max_examples=50)
@example(19935, {"type": "json_object"})  # a mask differed after the matcher's `rollback`
@given(st.integers(0, 10**9), st.sampled_from([fmt for fmt, _ in FORMATS]))
def test_plan_has_no_side_effects(grammars: Grammars, tokenizer: Tokenizer, seed: int, fmt: Any) -> None:
    """Each mask of a plan equals that of a fresh guide advanced by the preceding tokens."""
    rng, output = random.Random(seed), list[int]()
    text = tokenizer.encode('<ab>, {"a": true, "b": "red", "c": 100, "d": ["ab"]} redred-12')
    guide = grammars.guide(fmt)
    while not guide.ended and len(output) < 40:
        draft = guide.plan(text + output, rng.randint(0, 9), 1, 4)
        assert len(draft.tokens) == len(draft.sources) == len(draft.masks) - 1
        for i, mask in enumerate(draft.masks):
            fresh = grammars.guide(fmt)
            assert fresh.advance(output + draft.tokens[:i]) == len(output) + i
            assert mask == (fresh._matcher.compute_bitmask() if fresh.ended else masks_of(fresh))
            assert max(allowed(mask)) < tokenizer.vocab_size
        for token, source, mask in zip(draft.tokens, draft.sources, draft.masks):
            assert token in allowed(mask)
            assert token != 0
            assert source == GENERATED or (text + output + draft.tokens)[source] == token
        right = rng.randint(0, len(draft.tokens))
        drawn = rng.choice(allowed(draft.masks[right]))
        if drawn == 0:
            break
        new = [*draft.tokens[:right], drawn]
        taken = guide.advance(new)
        assert guide.ended or taken == len(new)
        output += new[:taken]
    assert guide.error is None


def test_allowed_texts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for fmt, right, wrong in (
        (schema(SCHEMA), '{"a": true, "b": "re", "c": -5, "d": ["ab", 12], "e": "x"}', '{"a":true'),
        (OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
        ({"type": "regex", "regex": "a|b+"}, "bbb", "ab"),
        *((MANY_CHOICES, text, "b") for text in (*SPECIAL_TEXTS, "7", "2999")),
        *((MANY_CHOICES, "7", text) for text in ("axx", "3000", "aba", "é")),
        ({"type": "grammar", "grammar": 'start: "a" start | "b"'}, "aab", "aa"),
        ({"type": "grammar", "grammar": 'root ::= "a" root | [b-d]'}, "aad", "aa"),
    ):
        assert accepts(grammars, fmt, tokenizer.encode(right)), fmt
        assert not accepts(grammars, fmt, tokenizer.encode(wrong)), fmt


def test_invalid_grammar_is_reported_in_one_line(grammars: Grammars) -> None:
    for fmt, sentence in (
        ({"type": "regex", "regex": "(a"}, "this regex cannot be compiled: .*unclosed group"),
        ({"type": "regex", "regex": r"[^\x00-\U0010FFFF]"}, "this regex .* no text matches it"),
        ({"type": "grammar", "grammar": "start: foo"}, 'this grammar cannot be .*unknown name: "foo"'),
        ({"type": "grammar", "grammar": "hello"}, "this grammar is not valid: Expected ::= at line 1"),
        (schema({"type": "objekt"}), "this json_schema cannot be compiled: Invalid type: objekt"),
        (schema({"$ref": "http://127.0.0.1:9/x"}), "this json_schema cannot be compiled: Resource"),
    ):
        with pytest.raises(ValueError, match=f"^response_format: .*{sentence}") as caught:
            grammars.check(SamplingParams(response_format=fmt))
        assert len(str(caught.value)) < 300
        assert "\n" not in str(caught.value)


def test_unusable_tokenizer_and_panic_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, params = tiny_tokenizer(tmp_path), SamplingParams(response_format=OBJECT)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not supported for models without an EOS token"):
        Grammars(Tokenizer(tmp_path), VOCAB).check(params)
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})("index out of bounds")
    monkeypatch.setattr(grammar, "_grammar_of", Mock(side_effect=panic))
    with pytest.raises(ValueError, match="^response_format: this json_object is not valid: index out of b"):
        Grammars(tokenizer, VOCAB).check(params)


def test_forced_tokens_are_drafted_before_lookup(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = grammars.guide({"type": "regex", "regex": "<<[a-z]{3,20}>>"})
    text = tokenizer.encode("<<green>>", add_special_tokens=False)
    draft = guide.plan(text, 50, 1, 4)
    assert tokenizer.decode(draft.tokens) == "<<green>>"
    assert draft.match_len == FORCED
    forced = [token for token, source in zip(draft.tokens, draft.sources) if source == GENERATED]
    assert tokenizer.decode(forced).startswith("<<")
    assert guide.plan(text, 3, 1, 4).tokens == draft.tokens[:3]
    assert guide.plan(text, 50, 1, 4, end=0).tokens == []  # out of time
    guide.advance(draft.tokens[:2])
    assert 0 < guide.plan(text + draft.tokens[:2], 9, 1, 4).match_len < FORCED


def test_end_and_disallowed_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ab, abab, bad = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "abab", "ab;;"))
    error = "response_format failed at output token 2: the token is not allowed."
    for tokens, *expected in ((ab, 1, False, None), ([*abab, 5, 6], 1, True, None), (bad, 2, False, error)):
        guide = grammars.guide({"type": "choice", "choice": ["ab", "abab"]})
        assert [guide.advance(tokens), guide.ended, guide.error] == expected


def test_parser_limit_in_lookahead_and_advance(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an ambiguous grammar, parsing cost grows with the text."""
    monkeypatch.setitem(grammar.LIMITS, "step_max_items", 100)
    fmt = {"type": "grammar", "grammar": 'start: x ";"\nx: "a" | x x'}
    guide, alone = (Grammars(tokenizer, VOCAB).guide(fmt) for _ in range(2))
    [a] = tokenizer.encode("a", add_special_tokens=False)
    output: list[int] = []
    while not guide.error:
        assert guide.plan([a] * 20 + output, 16, 1, 4).tokens[:1] in ([a], [])
        guide.advance([a])
        alone.advance([a])
        output.append(a)
        assert guide.error == alone.error
    assert 20 < len(output) < 90
    assert guide.error.startswith(f"response_format failed at output token {len(output)}: ")


def test_real_tokenizer(smollm2: Path) -> None:
    """The logits may have more columns than the tokenizer has tokens."""
    tokenizer = Tokenizer(smollm2)
    draft = Grammars(tokenizer, 49152 + 64).guide(schema(SCHEMA)).plan([], 20, 1, 4)
    assert tokenizer.decode(draft.tokens) == '{"a":'
    assert {len(mask) for mask in draft.masks} == {4 * (49216 // 32 + 1)}


def test_adversarial_formats_do_not_hang(grammars: Grammars) -> None:
    formats = [
        {"type": "regex", "regex": "(a|b)*a(a|b){200}"},
        schema({"type": "array", "minItems": 10**9}),
        schema({"$ref": "#"}),
        schema({"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}}),
        {"type": "grammar", "grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    ]
    for fmt in formats:
        message, begun = "", time.monotonic()
        try:
            grammars.check(SamplingParams(response_format=fmt))
            guide = grammars.guide(fmt)
            guide.advance(allowed(masks_of(guide))[-1:])
        except ValueError as error:
            message = str(error)
        assert len(message) < 1000
        assert "\n" not in message
        assert time.monotonic() - begun < 30, fmt
