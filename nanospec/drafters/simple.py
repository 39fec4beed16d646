"""Guess in plain Python: a subclass of `SimpleDrafter` defines `guess`, tokens in, tokens out.

    class Again(SimpleDrafter):
        def guess(self, tokens, k):
            return tokens[-1:] * k

    llm = LLM(model, drafter=Again())          # or behind lookup: drafter=["ngram", Again()]

It reads texts on the host, so steps with it are not captured: natural on a CPU, on a GPU slower than a
`Drafter` that proposes on the device. A wrong guess costs speed or gives an error, never another output:
guesses are checked here, and verified as those of other drafters.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from ..text.checks import as_int, shown
from .base import Drafter, guesses, nothing, room


class SimpleDrafter(Drafter):
    """Drafts on the host. Only `guess` must be defined; `__init__` is the subclass's own.

    Attributes:
        max_drafts: the most it ever guesses; may be set lower by the subclass.
        notes: a dict for what `guess` remembers of the request that it is asked about; empty when the request
            begins, or begins again after it had to make room for others.
    """

    runs_model = True  # drafting takes time
    reads_on_host = True
    notes: dict[str, Any]

    def guess(self, tokens: list[int], k: int) -> Iterable[int]:
        """Return up to `k` >= 1 tokens that may follow `tokens`, prompt and output so far; [] for no guess.

        Any iterable of integers will do; what is beyond k is not read. With an automatic number of drafts it
        is not called in every step, and seldom if a call takes longer than it saves.
        """
        raise NotImplementedError(f"{type(self).__name__} must define guess(self, tokens, k).")

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        self._notes: dict[int, dict[str, Any]] = {}

    def release(self, row: int) -> None:
        self._notes.pop(row, None)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        wanted = room(table, rows, min(k, self.max_drafts)).tolist()
        if not any(wanted):
            return nothing(rows, k)
        found = [self._ask(table, row, n) if n else [] for row, n in zip(rows.tolist(), wanted, strict=True)]
        counts = torch.tensor([len(drafts) for drafts in found], dtype=torch.int32, device=rows.device)
        padded = [drafts + [0] * (k - len(drafts)) for drafts in found]
        return guesses(torch.tensor(padded, dtype=torch.int32, device=rows.device), counts)

    def _ask(self, table: Table, row: int, most: int) -> list[int]:
        """Return the guesses for one row, checked."""
        text, name = table.tokens[row, : int(table.num_tokens[row])].tolist(), type(self).__name__
        length, self.notes = len(text), self._notes.setdefault(row, {})
        try:
            given = self.guess(text, most)
            found: list[Any] = [as_int(token) for token in islice(given, most)]
        except NotImplementedError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{name}.guess failed on {length} tokens, k={most}: {what}") from error
        for token in found:
            if type(token) is not int or not 0 <= token < table.vocab_size:
                ids = f"token ids are integers from 0 to {table.vocab_size - 1}"
                raise ValueError(f"{name}.guess gave {shown(token)}; {ids}.")
        return found
