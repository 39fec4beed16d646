"""What a request must give, without an engine: one token after the other, each from a row of its own that is
written anew, as though the request had been preempted before it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanospec.admission import Admission, HostWrites, write_history, write_row
from nanospec.config import SamplingParams, SpecConfig
from nanospec.kernels.codes import NAN_TOKEN
from nanospec.kernels.sampling import penalties, sample, top_k_top_p
from nanospec.kernels.table import Table
from nanospec.request import seed_of
from nanospec.sampling.base import registered
from nanospec.text.detokenize import Detokenizer
from nanospec.text.grammar import Grammars, Guide
from nanospec.text.tokenizer import Tokenizer
from tests.simulate.model import SUMS, Mock
from tests.tiny import tiny_tokenizer


class Expected(NamedTuple):
    """A request's output.

    Attributes:
        scores: at each token, what the model said (after `extra_args` and masks), float32 [V].
        text: with a tokenizer, after stop strings.
    """

    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    text: str
    scores: list[Tensor]


@cache
def tokenizer() -> Tokenizer:
    """Of 277 tokens; the first one ends texts."""
    with TemporaryDirectory() as folder:
        return tiny_tokenizer(Path(folder))


@cache
def grammars(vocab_size: int) -> Grammars:
    return Grammars(tokenizer(), vocab_size)


class Oracle:
    """Of one request."""

    def __init__(
        self, model: Mock, prompt: list[int], params: SamplingParams, window: int, text: bool
    ) -> None:
        self.model, self.params, self.prompt = model, params, prompt
        self.max_len = window if params.max_tokens is None else min(window, len(prompt) + params.max_tokens)
        own = (0,) if text and not params.ignore_eos else ()
        self.stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *own)))
        self.tokenizer = tokenizer() if text else None
        self.guide: Guide | None = None
        if params.response_format is not None:
            self.guide = grammars(model.config.vocab_size).guide(params.response_format)
        self.table = Table.empty(1, window + 1, 16, model.config.vocab_size, "cpu")
        self._write(prompt)

    def run(self) -> Expected:
        """All of its output."""
        tokens, scores, text, reason = list(self.prompt), list[Tensor](), "", ""
        stopped_by: str | int | None = None
        detokenizer = Detokenizer(self.tokenizer or tokenizer())
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
            old, text = len(text), text + detokenizer.push([token])
            found = self._stop_string(text, old, len(tokens))
            if self.guide is not None:
                self.guide.advance([token])
                reason = "stop" if self.guide.ended else "abort" if self.guide.error else ""
            if found is not None:
                (at, stopped_by), reason = found, "stop"
                return self._of(tokens, reason, stopped_by, text[:at], scores)
            if len(tokens) == self.max_len and not reason:
                reason = "length"
        old, text = len(text), text + detokenizer.flush()
        found = self._stop_string(text, old, len(tokens))
        if found is not None:
            text = text[: found[0]]
            if reason == "length":
                reason = "stop"
            stopped_by = found[1]
        return self._of(tokens, reason, stopped_by, text, scores)

    def _of(self, tokens: list[int], reason: str, by: Any, text: str, scores: list[Tensor]) -> Expected:
        return Expected(tokens[len(self.prompt) :], reason, by, text if self.tokenizer else "", scores)

    def _stop_string(self, text: str, old: int, num_tokens: int) -> tuple[int, str] | None:
        """(where, which) is the first stop string that ends behind the first `old` characters."""
        if num_tokens - len(self.prompt) < self.params.min_tokens:
            return None
        found = [(at, s) for s in self.params.stop if (at := text.find(s, max(old - len(s) + 1, 0))) >= 0]
        return min(found) if found else None

    def scores(self, tokens: list[int]) -> Tensor:
        """What the model says after a text, [V] in its dtype, as the request has it changed."""
        worth = self.model.worth[range(len(tokens)), tokens].sum()
        logits = self.model.scores([tokens[-1]], [int(worth) % SUMS])
        for name, value in self.params.extra_args.items():
            logits = self._changed(logits, name, value, len(tokens))
        if self.guide is not None:
            mask = self.guide.plan(tokens, 0, 1, 1).masks[0]
            allowed = torch.tensor([byte >> bit & 1 for byte in mask for bit in range(8)], dtype=torch.bool)
            size = self.model.config.vocab_size
            allowed = torch.nn.functional.pad(allowed, (0, max(size - len(allowed), 0)))[:size]
            logits = logits.masked_fill(~allowed, float("-inf"))
        return logits[0]

    def _changed(self, logits: Tensor, name: str, value: float, num_tokens: int) -> Tensor:
        """By a registered parameter."""
        parameter = registered()[name]
        if value == parameter.default:
            return logits
        given = logits.float()
        if num_tokens < self.table.min_len[0]:
            given[0, list(self.stop_ids)] = given.amin()
        return parameter.change(given, torch.tensor([[float(value)]])).to(logits.dtype)

    def draw(self, scores: Tensor, tokens: list[int]) -> int:
        """The token that comes after a text."""
        changed = scores.float()
        if self.params.changes_logits:
            self._write(tokens)
            changed = penalties.naive(changed, 0, len(tokens), [], self.table)
        return int(sample.draw(changed, 0, len(tokens), self.table))

    def allowed(self, scores: Tensor, tokens: list[int]) -> list[int]:
        """The tokens that sampling may draw after a text, for rules of acceptance that draw others."""
        changed = scores.float()
        if self.params.changes_logits:
            self._write(tokens)
            changed = penalties.naive(changed, 0, len(tokens), [], self.table)
        asked = self.params.temperature, max(self.params.top_k, 0), self.params.top_p, self.params.min_p
        least = top_k_top_p.naive(changed, *asked)
        found: list[int] = ((changed >= least) & (changed > float("-inf"))).nonzero().squeeze(1).tolist()
        return found

    def _write(self, tokens: list[int]) -> None:
        writes = HostWrites()
        seed = seed_of(self.params.seed, 0, 0)
        numbers = len(self.prompt), self.max_len, [0], 0, seed, self.stop_ids
        request = Admission(0, tokens, *numbers, self.params)
        write_row(writes, self.table, request, SpecConfig())
        writes.flush()
        if self.params.changes_logits:
            write_history(self.table, request)
