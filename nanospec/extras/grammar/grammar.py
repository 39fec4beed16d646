"""Grammar constraints as token masks, with llguidance (the optional dependency `nanospec[grammar]`).

    Grammars    compiles the grammars of `SamplingParams(response_format=...)` for one tokenizer
    Guide       tracks the output of one request; computes its token masks and drafts

A guide sees committed tokens only. It drafts on the host, because the matcher must consume each draft to
compute the mask after it. Drafts are tokens that the grammar forces, and tokens from an n-gram lookup in the
request's text and reference, up to the first one that the grammar forbids. A mask depends only on the tokens
before it, so speculation does not change the output.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import cycle, islice, repeat, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config import SamplingParams
from ...kernels import FROM_REFERENCE, GENERATED
from ...text.tokenizer import Tokenizer
from ...text.validation import reason
from .response_format import JSON_STYLE, check_conflicts, validate

FORCED = 64  # `match_len` of forced tokens: longer than any match, because they are always accepted
LIMITS: Any = {"verbose_errors": False}  # llguidance's default limits otherwise
SEPARATOR = 0x10FFFF  # the last character, stands for the token -1
NO_REFERENCE = np.empty(0, np.int32)
CACHED = 32  # compiled grammars in the cache
POINTER = re.compile(r"\s*(\^+|\d+ \|.*|<non-verbose/>)\s*")
MISSING = "llguidance is required for response_format; install it with: pip install 'nanospec[grammar]'."


class Draft(NamedTuple):
    """The drafts and masks of a request for one step.

    Attributes:
        tokens, sources, match_len: see `Proposal`.
        masks: the tokens allowed after the last committed token and after each draft, as bit masks.
    """

    tokens: list[int]
    sources: list[int]
    match_len: int
    masks: list[bytes]


class Compiled(NamedTuple):
    """A compiled grammar: llguidance's matcher in its initial state, the mask of the first token, and the
    tokens that end an output."""

    matcher: Any
    first: bytes
    ends: frozenset[int]


class Guide:
    """Tracks one output through its grammar. Implements `device.extension.Constraint`."""

    ended = False
    error: str | None = None

    def __init__(self, grammar: Compiled) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher.deep_copy()
        self._allowed = grammar.first  # the mask of the next token
        self._count = 0  # tokens consumed

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume committed tokens, without the EOS token. Return how many belong to the output: those up to
        the token that completes the grammar."""
        matcher, consumed = self._matcher, self._matcher.try_consume_tokens(list(tokens))
        if consumed == len(tokens) and not matcher.is_stopped():
            self._allowed = matcher.compute_bitmask()
        self.ended = matcher.is_stopped() and not matcher.is_error()
        if not self.ended and (consumed < len(tokens) or matcher.is_error()):
            consumed = min(consumed + 1, len(tokens))
            error, count = matcher.get_error() or "the token is not allowed", self._count + consumed
            self.error = f"response_format failed at output token {count}: {_message(error)}."
        self._count += consumed
        return consumed

    def plan(
        self, text: list[int], k: int, min_n: int, max_n: int, end: float = math.inf,
        reference: NDArray[np.int32] = NO_REFERENCE,
    ) -> Draft:  # fmt: skip
        """Return up to k drafts that continue `text` (prompt and output), and the masks. Lookup matches the
        last `min_n` to `max_n` tokens, as in `kernels/speculation/ngram.py`. No draft is added after the time
        `end`, in `perf_counter` seconds."""
        drafts, sources = list[int](), list[int]()
        masks, match_len = [self._allowed], 0
        matcher = self._matcher.deep_copy()  # after `rollback`, masks may differ (llguidance 1.9.1)
        while len(drafts) < k and not matcher.is_stopped():
            before = len(drafts)
            length, run = self._run(matcher, text + drafts, reference, min_n, max_n)
            for token, source in islice(run, k - before):
                late = time.perf_counter() > end
                if late or (mask := self._mask_after(matcher, token, masks[-1])) is None:
                    break
                drafts.append(token)
                sources.append(source)
                masks.append(mask)
            if len(drafts) == before:
                break
            match_len = match_len or length
        return Draft(drafts, sources, match_len, masks)

    def _run(
        self, matcher: Any, text: list[int], reference: NDArray[np.int32], min_n: int, max_n: int
    ) -> tuple[int, Iterator[tuple[int, int]]]:
        """Return the match length, and pairs (draft, source) that continue the text consumed so far."""
        if forced := matcher.compute_ff_tokens():
            return FORCED, zip(forced, repeat(GENERATED))
        whole, own = np.concatenate((reference, np.array([-1, *text], np.int32))), len(reference) + 1
        start, length = look_up(whole, min_n, min(max_n, len(text)))
        if start >= own:  # repeats the text since the match
            return length, ((text[i], i) for i in cycle(range(start - own, len(text))))
        copied = takewhile(lambda item: item[1] >= 0, enumerate(whole[start:].tolist(), start))
        return length, ((token, FROM_REFERENCE - i) for i, token in copied if length)

    def _mask_after(self, matcher: Any, token: int, allowed: bytes) -> bytes | None:
        """Consume a token and return the mask after it, or None if the token is forbidden or ends the
        output."""
        byte, bit = divmod(token, 8)
        if byte >= len(allowed) or not allowed[byte] >> bit & 1 or token in self._grammar.ends:
            return None
        consumed = matcher.try_consume_tokens([token]) == 1
        mask: bytes = matcher.compute_bitmask() if consumed else b""
        return None if matcher.is_error() else mask or None


class Grammars:
    """Compiles and caches grammars for one tokenizer and logits of `vocab_size` tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled = lru_cache(CACHED)(self._compile)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError if the `response_format` is malformed, conflicts with other parameters, or cannot
        be compiled."""
        if (response_format := validate(params.response_format)) is not None:
            check_conflicts(params)
            self._compiled(json.dumps(response_format))

    def guide(self, response_format: Mapping[str, Any]) -> Guide:
        """Return a guide for one output. The `response_format` must have passed `check`."""
        return Guide(self._compiled(json.dumps(validate(response_format))))

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer in llguidance's format. The conversion takes half a second."""
        if not self._tokenizer.eos_token_ids:
            raise ValueError("response_format is not supported for models without an EOS token.")
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
        except BaseException as error:  # a panic in Rust is not an Exception
            raise ValueError(f"{what} is not valid: {reason(error)}.") from None
        if matcher.is_error():
            raise ValueError(f"{what} cannot be compiled: {_message(matcher.get_error())}.")
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
        texts = dict.fromkeys(response_format[kind])  # a regex, as the parser allows only 1,000 alternatives
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, texts)))
    return LLMatcher.grammar_from_lark(any_to_lark(response_format[kind]))


def look_up(text: NDArray[np.int32], min_n: int, max_n: int) -> tuple[int, int]:
    """Return (the index of the token after the match, the match length) for the longest and then latest match
    of the last min_n to max_n tokens earlier in `text`, or (-1, 0) without a match."""
    characters = np.minimum(text.view(np.uint32), SEPARATOR).tobytes().decode("utf-32-le", "surrogatepass")
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        at = characters.rfind(characters[-n:], 0, -1)
        if at >= 0 and text[at + n] >= 0:
            return at + n, n
    return -1, 0


def _message(error: str) -> str:
    """Return an error message of llguidance without its excerpts of the grammar, to end a sentence with."""
    if error.startswith("NoExtension"):
        return "no text matches it"
    lines = [line.strip() for line in error.splitlines() if not POINTER.fullmatch(line)]
    return reason(" ".join(lines))
