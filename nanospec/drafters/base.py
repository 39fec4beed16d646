"""What every way of guessing has in common: its interface, and the register of methods.

One step:   propose -> lay out, forward, sample, commit (`step.py`) -> learn

Both run inside the captured step, so nothing in them waits for the device unless `may_wait` allows it.
What a drafter remembers of a request lies in device rows of its own, one per request row, and a last one
that padding rows may write to.

A new way of guessing is a subclass of `Drafter`, or of `SimpleDrafter` (`simple.py`) for plain Python:

    class Echo(Drafter):
        def propose(self, table, rows, k):
            index = rows.clamp(min=0)
            last = table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]
            return guesses(last[:, None].repeat(1, k), room(table, rows, k))

`LLM(model, drafter=Echo())` uses it, `drafter=["ngram", Echo()]` only where lookup finds nothing. In a file
of this folder, as `class Echo(Drafter, method="echo", help="the last token again")`, it is a method like the
others: `--spec echo`, `SpecConfig(method="ngram+echo")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.codes import GUESSED, MAX_DRAFTS, NOBODY
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.proposal import room as room  # for drafters
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models.plugins import import_all

if TYPE_CHECKING:
    from ..config import SpecConfig
    from ..extras.tensor_parallel.group import Group
    from ..models.decoder import Model
    from ..text.tokenizer import Tokenizer


class Option(NamedTuple):
    """Something that a method lets the user set: `--some-name` on the command line, and a field of
    `SpecConfig` or, if it has none of that name, an entry of `SpecConfig.options`."""

    name: str
    help: str
    kind: Callable[[str], Any] = str
    metavar: str | None = None


class Target(NamedTuple):
    """The model to guess for, where it was loaded from, and the ranks that it is split among, if it is."""

    model: Model
    folder: Path | None = None
    tokenizer: Tokenizer | None = None
    group: Group | None = None


class Drafter:
    """Guesses tokens from the request rows. Only `propose` must be defined.

    Attributes:
        method, help, options: what the user knows it by; for statistics and the command line.
        names: the methods that `Proposal.drafter` tells apart.
        makes_trees: whether a tree width above 1 means anything to it.
        reads_logits: whether `learn` needs the logits of all tokens.
        max_drafts: the most it ever guesses for a row.
        runs_model: whether its guesses cost time before it is known what they are worth.
        passes: for how many drafts its model is run in the next step without a graph; None: for all.
        weight_bytes: what its weights take.
        kv_bytes_per_token, max_context: what a cache of its own takes, and how far it reaches.
        reads_on_host: whether it must wait for the device, so that steps with it cannot be captured.
        may_wait: whether steps are not captured, so that it may wait for the device.
    """

    method: ClassVar[str] = ""
    help: ClassVar[str] = ""
    options: ClassVar[tuple[Option, ...]] = ()
    makes_trees: ClassVar[bool] = False
    reads_logits: bool = False
    runs_model: bool = False
    reads_on_host: bool = False
    max_drafts: int = MAX_DRAFTS
    passes: int | None = None
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    max_context: int | None = None
    may_wait: bool = False

    def __init_subclass__(cls, method: str = "", help: str = "", **further: Any) -> None:
        super().__init_subclass__(**further)
        if method:
            cls.method, cls.help = method, help
            METHODS[method] = cls

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> Drafter:
        """The drafter with its weights in place; ValueError or FileNotFoundError if something is missing."""
        return cls()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """Itself, or the drafters that it is made of. The worker speaks to each of them, but for `propose`,
        `learn` and `ms`."""
        return (self,)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.method or type(self).__name__,)

    def behind(self, first: Drafter) -> Drafter:
        """Both, for a method "first+this": this one guesses where `first` has no drafts."""
        from .first_match import FirstMatch

        return FirstMatch(first, self)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        """Make device rows and caches, at addresses that stay. `max_tokens`: the most to compute before a
        step."""
        self.may_wait = may_wait

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        """Up to `k` drafts, in k columns, for each of the request rows [B] int32; none for -1, none beyond
        `room`. Ids must lie within the vocabulary: on a GPU nobody looks."""
        raise NotImplementedError

    def learn(
        self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor, logits: Tensor
    ) -> None:
        """See what the target made of the drafts: its hidden states [T, H], logits [T, V] (of a split model
        only with `reads_logits`) and its verdict over `batch`, which is committed already.
        `proposal.drafter` is NOBODY for rows that others drafted for."""

    # What the host tells, between steps. Blocks are the request's pages, in order.

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_cached: int) -> None:
        """A request of so many tokens took the row; its first `num_cached` blocks hold the target's K/V."""

    def grow(self, row: int, blocks: Sequence[int]) -> None:
        """The request of a row got further blocks."""

    def release(self, row: int) -> None:
        """The request of a row has left it, and its blocks."""

    def catch_up(self, rows: Sequence[int]) -> None:
        """Before a step that may not wait: compute what is missing of these rows' texts."""

    def follow(self, rows: Sequence[int]) -> Callable[[], None]:
        """Behind a step: start copying what the host must know of these rows; the result takes it in."""
        return lambda: None

    def rehearse(self, count: int) -> None:
        """Make the first `count` rows draft, as the table has them now, while a step is timed."""

    def measure(self) -> None:
        """Time what `ms` tells."""

    def ms(self, batch: int, passes: int) -> float:
        """Milliseconds that so many passes for `batch` rows take, beyond what the step takes."""
        return 0.0


METHODS: dict[str, type[Drafter]] = {}


def registered() -> Mapping[str, type[Drafter]]:
    """All methods in the order of their names, those of this folder included."""
    import_all(__package__)
    return dict(sorted(METHODS.items()))


def method_names() -> list[str]:
    """Return the values of `SpecConfig.method`: each method, pairs whose first costs nothing, and "none"."""
    known = registered()
    pairs = [f"{a}+{b}" for a in known for b in known if a != b and not known[a].runs_model]
    return [*known, *pairs, "none"]


def guesses(drafts: Tensor, num_drafts: Tensor, parents: Tensor | None = None) -> Proposal:
    """A proposal of a model: drafts [B, K] int32, of which the first `num_drafts` [B] int32 count."""
    source, zeros = _constants(*drafts.shape, drafts.device)
    drafter = num_drafts.clamp(max=1) - 1  # 0, or NOBODY without drafts
    return Proposal(drafts.int().contiguous(), num_drafts.int(), source, zeros, drafter.int(), parents)


def nothing(rows: Tensor, k: int) -> Proposal:
    """No drafts for any of the rows [B]. Launches nothing but the first time, and is not to be changed."""
    return _nothing(rows.shape[0], k, rows.device)


@cache
def _nothing(B: int, k: int, device: torch.device) -> Proposal:
    source, zeros = _constants(B, k, device)
    return Proposal(torch.zeros_like(source), zeros, source, zeros, torch.full_like(zeros, NOBODY))


@cache
def _constants(B: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source [B, k] of a model's drafts, and the length [B] of their matches. Made outside of graph
    capture, at the first call."""
    source = torch.full((B, k), GUESSED, dtype=torch.int32, device=device)
    return source, torch.zeros(B, dtype=torch.int32, device=device)


def scatter(part: Proposal, chosen: Tensor, rows: Tensor) -> Proposal:
    """A proposal for the `chosen` [C] of the rows [B] as one for all of them."""
    whole = Proposal(*(tensor.clone() for tensor in nothing(rows, part.drafts.shape[1])[:5]))
    for all_rows, own in zip(whole[:5], part[:5], strict=True):
        all_rows[chosen] = own
    if part.logits is not None:
        logits = part.logits.new_zeros(len(rows), *part.logits.shape[1:])
        logits[chosen] = part.logits
        whole = whole._replace(logits=logits)
    return whole
