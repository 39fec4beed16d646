"""Grammars as masks: allowed tokens, drafts, and lookahead without side effects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanospec.extras.grammar.grammar as grammar
from nanospec.apps.openai_format import BYTES
from nanospec.config import SamplingParams
from nanospec.extras.grammar.grammar import FORCED, Grammars, Guide, look_up
from nanospec.kernels import GENERATED
from nanospec.kernels.speculation import ngram
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.extras.grammar.guided import FORMATS, SCHEMA, VOCAB
from tests.tiny import tiny_tokenizer

IDS = (0, 1, 2, 256, 65536, 0xD800, 0xDC00)
OBJECT = {"type": "json_object"}
BYTE_OF = {byte: letter for letter, byte in BYTES.items()}


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
@given(st.lists(st.sampled_from(IDS), max_size=40), st.integers(1, 4), st.integers(0, 6))
def test_lookup_matches_ngram_kernel(text: list[int], least: int, more: int) -> None:
    """Also for ids that are surrogates in UTF-16."""
    starts, n = ngram.matches(torch.tensor(text, dtype=torch.int32), least, least + more)
    expected = (int(starts[0]), n) if n else (-1, 0)
    assert look_up(text, least, least + more) == expected


@settings(max_examples=50)
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


@pytest.mark.parametrize(
    ("fmt", "right", "wrong"),
    [
        (schema(SCHEMA), '{"a": true, "b": "re", "c": -5, "d": ["ab", 12], "e": "x"}', '{"a":true'),
        (schema({"const": {"a": 1}, "x-guidance": {"key_separator": ":"}}), '{"a":1}', '{"a": 1}'),
        (OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
        ({"type": "regex", "regex": "a|b+"}, "bbb", "ab"),
        ({"type": "choice", "choice": ['a"\\\n', "é\x00\u2028😀"]}, "é\x00\u2028😀", "é"),
        ({"type": "grammar", "grammar": 'start: "a" start | "b"'}, "aab", "aa"),
        ({"type": "grammar", "grammar": 'root ::= "a" root | [b-d]'}, "aad", "aa"),
    ],
    ids=["schema", "style", "object", "regex", "choice", "lark", "gbnf"],
)
def test_allowed_texts(
    grammars: Grammars, tokenizer: Tokenizer, fmt: dict[str, Any], right: str, wrong: str
) -> None:
    assert accepts(grammars, fmt, tokenizer.encode(right))
    assert not accepts(grammars, fmt, tokenizer.encode(wrong))


@pytest.mark.parametrize(
    ("fmt", "sentence"),
    [
        ({"type": "regex", "regex": "(a"}, "this regex cannot be compiled: .*unclosed group"),
        ({"type": "regex", "regex": r"[^\x00-\U0010FFFF]"}, "this regex .* no text matches it"),
        ({"type": "grammar", "grammar": "start: foo"}, 'this grammar cannot be .*unknown name: "foo"'),
        ({"type": "grammar", "grammar": "hello"}, "this grammar is not valid: Expected ::= at line 1"),
        ({"type": "grammar", "grammar": "root ::= " + "(" * 30000}, "this grammar is not .*recursion"),
        ({"type": "regex", "regex": "(" * 30000}, "this regex cannot be compiled"),
        (schema({"type": "objekt"}), "this json_schema cannot be compiled: Invalid type: objekt"),
        (schema({"not": {}}), 'this json_schema cannot be compiled: Unimplemented keys: ..not"'),
        (schema({"$ref": "http://127.0.0.1:9/x"}), "this json_schema cannot be compiled: Resource"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable schema"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_grammar_is_reported_in_one_line(
    grammars: Grammars, fmt: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^response_format: .*{sentence}") as caught:
        grammars.check(SamplingParams(response_format=fmt))
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


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
    assert grammars.guide({"type": "regex", "regex": "[a-z]+"}).plan([], 5, 1, 4).tokens == []


def test_end_and_disallowed_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ab, abab, bad = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "abab", "ab;"))
    for tokens, taken, ended in ((ab, 1, False), ([*abab, 5, 6], 1, True)):
        guide = grammars.guide({"type": "choice", "choice": ["ab", "abab"]})
        assert (guide.advance(tokens), guide.ended, guide.error) == (taken, ended, None)
    guide = grammars.guide({"type": "choice", "choice": ["ab", "abab"]})
    assert (guide.advance([*bad, 1]), guide.ended) == (len(bad), False)
    assert guide.error == "response_format failed at output token 2: the token is not allowed."


def test_parser_limit_in_lookahead_and_advance(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an ambiguous grammar, parsing cost grows with the text."""
    monkeypatch.setitem(grammar.LIMITS, "step_max_items", 100)
    fmt = {"type": "grammar", "grammar": 'start: x ";"\nx: "a" | x x'}
    guide, alone = (Grammars(tokenizer, VOCAB).guide(fmt) for _ in range(2))
    [a] = tokenizer.encode("a", add_special_tokens=False)
    output: list[int] = []
    lost = 0
    while not guide.error:
        before = guide._matcher
        assert guide.plan([a] * 20 + output, 16, 1, 4).tokens[:1] in ([a], [])
        lost += guide._matcher is not before
        guide.advance([a])
        alone.advance([a])
        output.append(a)
        assert guide.error == alone.error
    assert lost > 5
    assert 20 < len(output) < 90
    assert guide.error.startswith(f"response_format failed at output token {len(output)}: ")


def test_panic_during_compilation_is_a_grammar_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any, **__: Any) -> None:
        raise type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})("index out of bounds")

    monkeypatch.setattr("llguidance.LLMatcher", panic)
    panic.grammar_from_regex = str  # type: ignore[attr-defined]
    message = r"^response_format: this regex is not valid: index out of bounds\.$"
    with pytest.raises(ValueError, match=message):
        Grammars(tokenizer, VOCAB).check(SamplingParams(response_format={"type": "regex", "regex": "a"}))


def test_tokenizer_without_eos_is_rejected(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not supported for models without an EOS token"):
        Grammars(Tokenizer(tmp_path), VOCAB).check(SamplingParams(response_format=OBJECT))


def test_real_tokenizer(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    guide = Grammars(tokenizer, 49152 + 64).guide(schema(SCHEMA))
    draft = guide.plan([], 20, 1, 4)
    assert tokenizer.decode(draft.tokens) == '{"a":'
    assert {len(mask) for mask in draft.masks} == {4 * (49216 // 32 + 1)}
    guide.advance(tokenizer.encode('{"a": true, "b": "'))
    assert "green" in {tokenizer.decode([t]) for t in allowed(masks_of(guide))}


def test_many_choices(tokenizer: Tokenizer) -> None:
    """More choices than the parser's limit: exactly these texts are allowed."""
    odd = ["a.*", "b|c", "d\ne", "-~/\\^$#& é", "ab", "abab"]
    fmt = {"type": "choice", "choice": [*odd, *odd, *map(str, range(3000))]}
    grammars, ids = Grammars(tokenizer, VOCAB), tokenizer.backend.get_vocab()
    for text in (*odd, "7", "2999", "axx", "b", "3000", "aba"):
        spelled = [ids[BYTE_OF[byte]] for byte in text.encode()]
        assert accepts(grammars, fmt, spelled) == (text in fmt["choice"]), text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "fmt",
    [
        {"type": "regex", "regex": "a{1000000}"},
        {"type": "regex", "regex": "(a|b)*a(a|b){200}"},
        {"type": "regex", "regex": "(.*)*" * 500},
        schema({"enum": [f"value{i:05d}" for i in range(4000)]}),
        schema({"type": "array", "minItems": 10**9}),
        schema({"type": "string", "minLength": 10**9}),
        schema({"$ref": "#"}),
        schema({"$ref": "file:///etc/passwd"}),
        schema({"allOf": [{"type": "string", "pattern": f"x{i}.*y"} for i in range(12)]}),
        schema({"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}}),
        {"type": "grammar", "grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    ],
    ids=lambda fmt: str(fmt)[:60],
)
def test_adversarial_formats_do_not_hang(grammars: Grammars, fmt: dict[str, Any]) -> None:
    message = ""
    try:
        grammars.check(SamplingParams(response_format=fmt))
        guide = grammars.guide(fmt)
        for _ in range(4):
            if not guide.ended and not guide.error:
                guide.advance(allowed(masks_of(guide))[-1:])
    except ValueError as error:
        message = str(error)
    assert len(message) < 1000
    assert "\n" not in message
