"""Compute the expected output of a request without an engine, one token at a time.

The noise and the arithmetic of sampling are the engine's, because outputs must be bitwise identical. The rest
is independent: the sampling row is built directly from the parameters, each token is checked against
`tests/exact.py`, and texts are decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from campaigns.simulate.model import SUMS, Mock
from nanospec.config import SamplingParams
from nanospec.engine.request import derive_seed
from nanospec.extras.grammar.grammar import LIMITS, Grammars, Guide
from nanospec.kernels import NAN_TOKEN
from nanospec.kernels.sampling import sample
from nanospec.kernels.sampling.scores import penalize
from nanospec.kernels.table import Table
from nanospec.text.tokenizer import Tokenizer
from tests import exact
from tests.tiny import tiny_tokenizer

TEXT_VOCAB = 300  # vocabulary size of engines with a tokenizer


class Expected(NamedTuple):
    """The expected output of a request.

    Attributes:
        text: the text up to a stop string; "" without a tokenizer.
        scores: the logits [V] of each token, after grammar masks.
    """

    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    text: str
    scores: list[Tensor]


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer with 277 tokens. Token 0 is the EOS token."""
    with TemporaryDirectory() as folder:
        return tiny_tokenizer(Path(folder))


@cache
def grammars(vocab_size: int, items: int | None) -> Grammars:
    return Grammars(tokenizer(), vocab_size)


@contextmanager
def limited(engine: dict[str, Any]) -> Iterator[None]:
    """Apply the scenario's limit of parser items per step to grammars compiled in the context."""
    items = engine.get("items")
    with mock.patch.dict(LIMITS, {} if items is None else {"step_max_items": items}):
        yield


class Oracle:
    """Computes the output of one request."""

    def __init__(
        self, model: Mock, prompt: list[int], params: SamplingParams, engine: dict[str, Any], index: int
    ) -> None:
        """Create the oracle. `engine` are the scenario's settings; `index` numbers the outputs if n > 1."""
        window, text = engine["window"], engine["vocab"] == TEXT_VOCAB
        self.model, self.params, self.prompt, self.index = model, params, prompt, index
        self.max_len = window if params.max_tokens is None else min(window, len(prompt) + params.max_tokens)
        eos = (0,) if text and not params.ignore_eos else ()
        self.stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
        self.tokenizer = tokenizer() if text else None
        self.guide: Guide | None = None
        if params.response_format is not None:
            with limited(engine):
                self.guide = grammars(TEXT_VOCAB, engine.get("items")).guide(params.response_format)
        self.table = self._row()
        self._params = replace(params, stop_token_ids=self.stop_ids)  # min_tokens forbids all of them

    def run(self) -> Expected:
        """Return the output."""
        tokens, scores, text, reason = list(self.prompt), list[Tensor](), "", ""
        stopped_by: str | int | None = None
        while not reason:
            scores.append(self.scores(tokens))
            token = self.draw(scores[-1], tokens)
            if token == NAN_TOKEN:
                scores.pop()
                reason = "abort"
                break
            tokens.append(token)
            if token in self.stop_ids:
                reason = "stop"
                stopped_by = token if token in self.params.stop_token_ids else None
                break
            old, text = len(text), self._text(tokens, len(text))
            match = self._stop_string(text, old, len(tokens))
            if self.guide is not None:
                self.guide.advance([token])
                reason = "stop" if self.guide.ended else "abort" if self.guide.error else ""
            if match is not None:
                (at, stopped_by), reason = match, "stop"
                return self._of(tokens, reason, stopped_by, text[:at], scores)
            if len(tokens) == self.max_len and not reason:
                reason = "length"
        ends = bool(tokens[len(self.prompt) :]) and tokens[-1] in self.stop_ids
        old, text = len(text), self._text(tokens[:-1] if ends else tokens, None)
        match = self._stop_string(text, old, len(tokens))
        if match is not None:
            text = text[: match[0]]
            if reason == "length":
                reason = "stop"
            stopped_by = match[1]
        return self._of(tokens, reason, stopped_by, text, scores)

    def _text(self, tokens: list[int], known: int | None) -> str:
        """Return the text of the output. With `known`, hold back a last character that may still change."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(tokens[len(self.prompt) :])
        return text if known is None else text[: max(len(text) - text.endswith("\ufffd"), known)]

    def _of(self, tokens: list[int], reason: str, by: Any, text: str, scores: list[Tensor]) -> Expected:
        return Expected(tokens[len(self.prompt) :], reason, by, text, scores)

    def _stop_string(self, text: str, old: int, num_tokens: int) -> tuple[int, str] | None:
        """Return (position, string) of the first stop string that ends after the first `old` characters."""
        if num_tokens - len(self.prompt) < self.params.min_tokens:
            return None
        matches = [(at, s) for s in self.params.stop if (at := text.find(s, max(old - len(s) + 1, 0))) >= 0]
        return min(matches) if matches else None

    def scores(self, tokens: list[int]) -> Tensor:
        """Return the logits [V] after a text, with the request's grammar mask."""
        worth = self.model.worth[np.arange(len(tokens)), np.array(tokens)].sum()
        logits = self.model.scores(tokens[-1], int(worth) % SUMS)
        if tuple(tokens) in self.model.nan_after:
            logits.fill_(float("nan"))
        if self.guide is not None:
            mask = self.guide.plan(tokens, 0, 1, 1).masks[0]
            allowed = torch.tensor([byte >> bit & 1 for byte in mask for bit in range(8)], dtype=torch.bool)
            size = self.model.config.vocab_size
            allowed = torch.nn.functional.pad(allowed, (0, max(size - len(allowed), 0)))[:size]
            logits = logits.masked_fill(~allowed, float("-inf"))
        return logits

    def draw(self, scores: Tensor, tokens: list[int]) -> int:
        """Sample the token after a text."""
        changed = scores.float()
        if self.params.changes_logits:
            self.table.output_counts[0] = torch.bincount(
                torch.tensor(tokens[len(self.prompt) :], dtype=torch.long), minlength=len(scores)
            )
            changed = penalize(changed, 0, len(tokens), [], self.table)
        token = int(sample.draw(changed, 0, len(tokens), self.table))
        allowed = token == NAN_TOKEN or self.is_possible(scores, tokens, token)
        assert allowed, f"token {token} was sampled, but is not allowed"
        return token

    def is_possible(self, scores: Tensor, tokens: list[int], token: int) -> bool:
        """Return whether a token has nonzero probability after a text."""
        output = tuple(tokens[len(self.prompt) :])
        x = exact.changed(scores.double().numpy(), self.prompt, output, self._params)
        return exact.may_draw(x, token, self._params)

    def _row(self) -> Table:
        """Return a table with one row that has the request's sampling parameters."""
        params, size = self.params, self.model.config.vocab_size
        table = Table.empty(1, 1, 1, size, "cpu")
        for column, value in (
            (table.temperature, params.temperature),
            (table.top_k, params.top_k),
            (table.top_p, params.top_p),
            (table.min_p, params.min_p),
            (table.seed, derive_seed(params.seed, self.index, 0)),
            (table.min_len, len(self.prompt) + params.min_tokens),
            (table.repetition, params.repetition_penalty),
            (table.presence, params.presence_penalty),
            (table.frequency, params.frequency_penalty),
        ):
            column[0] = value
        stop_ids = (*self.stop_ids, *[-1] * table.num_stops)[: table.num_stops]
        table.stop_ids[0] = torch.tensor(stop_ids)
        table.in_prompt[0, list(self.prompt)] = True
        for token, bias in params.logit_bias.items():
            table.bias[0, token] = bias
        return table
