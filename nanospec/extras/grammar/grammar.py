"""Constraints on an output as masks of tokens: grammars, compiled and followed by llguidance (an extra).

    Grammars    compiles the grammars of `SamplingParams(response_format=...)`, for one tokenizer
    Guide       follows the output of one request: which tokens may come next, and drafts

A guide sees committed tokens only. Drafts are made here, on the host, as the matcher must consume each to
give the mask after it: tokens that the grammar forces, and those that a lookup in the request's own text
finds, up to the first that the grammar does not allow. A mask depends on the tokens before it only, so the
output is the same with drafts and without.
"""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import cycle, islice, repeat
from typing import Any, NamedTuple

from ...config import SamplingParams
from ...kernels import GUESSED
from ...text import reason
from ...text.tokenizer import Tokenizer
from .response_format import check_together, checked

FORCED = 64  # `match_len` of tokens that the grammar forces: longer than any, as they are always accepted
LIMITS: Any = {"verbose_errors": False}  # beside llguidance's own
CACHED = 32  # compiled grammars that are kept
# Fixed separators: models tend to endless white space, and fixed separators can be guessed.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
POINTER = re.compile(r"\s*(\^+|\d+ \|.*|<non-verbose/>)\s*")
MISSING = "response_format needs the library llguidance: pip install 'nanospec[grammar]'."


class Draft(NamedTuple):
    """The drafts for a request, and the masks of its step.

    Attributes:
        tokens, sources, match_len: see `Proposal`.
        masks: after the last committed token and after each draft, which tokens may follow: a bit each.
    """

    tokens: list[int]
    sources: list[int]
    match_len: int
    masks: list[bytes]


class Compiled(NamedTuple):
    """A grammar at its beginning: llguidance's matcher, never advanced; the first mask; the tokens that end
    an output."""

    matcher: Any
    first: bytes
    ends: frozenset[int]


class Guide:
    """Follows one output, as `device.extension.Constraint`."""

    ended = False
    error: str | None = None

    def __init__(self, grammar: Compiled) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher.deep_copy()
        self._allowed = grammar.first  # the mask of the next token
        self._tokens: list[int] = []

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume committed tokens, without the token that ends the text; return how many belong to the
        output: none after the one that completes the grammar."""
        matcher, taken = self._matcher, self._matcher.try_consume_tokens(list(tokens))
        if taken == len(tokens) and not matcher.is_stopped():
            self._allowed = matcher.compute_bitmask()
        self.ended = matcher.is_stopped() and not matcher.is_error()
        if not self.ended and (taken < len(tokens) or matcher.is_error()):
            taken = min(taken + 1, len(tokens))
            error, count = matcher.get_error() or "a token that it does not allow", len(self._tokens) + taken
            self.error = f"response_format could not be followed beyond {count} tokens: {_message(error)}."
        self._tokens += tokens[:taken]
        return taken

    def plan(self, text: list[int], most: int, min_n: int, max_n: int, end: float = math.inf) -> Draft:
        """Return at most `most` drafts after the request's text (prompt and output), and all masks. Lookup
        takes the last `min_n` to `max_n` tokens; no draft is added after the time `end` (`perf_counter`)."""
        drafts, sources = list[int](), list[int]()
        masks, match_len = [self._allowed], 0
        while len(drafts) < most and not self._matcher.is_stopped():
            before = len(drafts)
            length, run = self._run(text + drafts, min_n, max_n)
            for token, source in islice(run, most - before):
                late = time.perf_counter() > end
                if late or (mask := self._mask_behind(token, masks[-1])) is None:
                    break
                drafts.append(token)
                sources.append(source)
                masks.append(mask)
            if len(drafts) == before:
                break
            match_len = match_len or length
        if not self._matcher.rollback(len(drafts)) or self._matcher.is_error():
            self._matcher = self._grammar.matcher.deep_copy()  # looking ahead exceeded its limits
            self._matcher.try_consume_tokens(self._tokens)
        return Draft(drafts, sources, match_len, masks)

    def _run(self, text: list[int], min_n: int, max_n: int) -> tuple[int, Iterator[tuple[int, int]]]:
        """Return `match_len` and drafts with their sources after a text that the matcher has followed."""
        if forced := self._matcher.compute_ff_tokens():
            return FORCED, zip(forced, repeat(GUESSED))
        first, length = look_up(text, min_n, max_n)
        sources = cycle(range(first, len(text))) if length else ()  # at the end of the text back to the match
        return length, ((text[i], i) for i in sources)

    def _mask_behind(self, token: int, allowed: bytes) -> bytes | None:
        """Let the matcher follow a token and return the mask after it; None if it is not allowed, or ends the
        output."""
        byte, bit = divmod(token, 8)
        if byte >= len(allowed) or not allowed[byte] >> bit & 1 or token in self._grammar.ends:
            return None
        followed = self._matcher.try_consume_tokens([token]) == 1
        mask: bytes = self._matcher.compute_bitmask() if followed else b""
        return None if self._matcher.is_error() else mask or None


class Grammars:
    """Compiles grammars for one tokenizer, and for logits of `vocab_size` tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled = lru_cache(CACHED)(self._compile)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError with a sentence if the `response_format` is malformed, does not go with the other
        parameters or cannot be compiled."""
        if (response_format := checked(params.response_format)) is not None:
            check_together(params)
            self._compiled(json.dumps(response_format))

    def guide(self, response_format: Mapping[str, Any]) -> Guide:
        """Return the guide of one output, for a `response_format` that has passed `check`."""
        return Guide(self._compiled(json.dumps(checked(response_format))))

    @cached_property
    def _tokens(self) -> Any:
        """Convert the tokenizer for llguidance, which takes half a second."""
        if not self._tokenizer.eos_token_ids:
            raise ValueError("response_format needs a model with a token that ends its texts.")
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ValueError(MISSING) from None
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        ends = list(self._tokenizer.eos_token_ids)
        return LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=size, eos_token=ends)

    def _compile(self, text: str) -> Compiled:
        tokens, response_format = self._tokens, json.loads(text)
        from llguidance import LLMatcher, LLParserLimits

        what = f"response_format: this {response_format['type']}"
        try:
            grammar = _grammar_of(response_format)
            matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
            first = b"" if matcher.is_error() else matcher.compute_bitmask()
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # of several kinds; a panic in Rust is no Exception
            raise ValueError(f"{what} is no grammar: {reason(error)}.") from None
        if matcher.is_error():
            raise ValueError(f"{what} cannot be followed: {_message(matcher.get_error())}.")
        return Compiled(matcher, first, frozenset(self._tokenizer.eos_token_ids))


def _grammar_of(response_format: Mapping[str, Any]) -> str:
    """Return the grammar in llguidance's format."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind = response_format["type"]
    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else response_format[kind]["schema"]
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_STYLE)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(response_format[kind])
    if kind == "choice":
        texts = dict.fromkeys(response_format[kind])  # as one regex: the parser takes 1,000 alternatives
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, texts)))
    return LLMatcher.grammar_from_lark(any_to_lark(response_format[kind]))


def look_up(text: Sequence[int], min_n: int, max_n: int) -> tuple[int, int]:
    """Return the first of `kernels.speculation.ngram.matches` for a list, or (-1, 0): the index of the token
    that followed it, and its length."""
    characters = array("I", text).tobytes().decode("utf-32-le", "surrogatepass")  # one for each token
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        if (at := characters.rfind(characters[-n:], 0, -1)) >= 0:
            return at + n, n
    return -1, 0


def _message(error: str) -> str:
    """Return an error of llguidance as part of a sentence, without the lines that point into the grammar."""
    if error.startswith("NoExtension"):
        return "it allows no text"
    lines = [line.strip() for line in error.splitlines() if not POINTER.fullmatch(line)]
    return reason(" ".join(lines))
