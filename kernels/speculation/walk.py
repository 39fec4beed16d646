"""The rows of a batch in plain Python, and the walk of verification through one: what the `naive`
operations that draw, accept and verify share.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..batch import Batch


class Row(NamedTuple):
    """A row of a batch, chain or tree. Place 0 is its last committed token, the others are its drafts.

    Attributes:
        request: its request row, -1 where it takes no part.
        start: flat index of its first token.
        ids: its tokens, by place.
        parents: the place that each place follows.
    """

    request: int
    start: int
    ids: list[int]
    parents: list[int]

    def children(self, place: int) -> list[int]:
        """The drafts that follow a place, in order."""
        return [c for c in range(1, len(self.ids)) if self.parents[c] == place]

    def drafts_to(self, place: int) -> list[int]:
        """The tokens drafted on the way to a place, its own included."""
        ids = []
        while place:
            ids.append(self.ids[place])
            place = self.parents[place]
        return ids

    def walk(self, targets: Tensor | Sequence[int]) -> Iterator[int]:
        """The places whose targets verification reads: from each to the first child that carries its target.

        The target ([T], by flat index) of a place is read after the place is given, so it may be drawn then.
        """
        place = 0
        for _ in self.ids:  # ends a walk through parents in a circle too
            yield place
            target = int(targets[self.start + place])
            accepted = [c for c in self.children(place) if self.ids[c] == target]
            if not accepted:
                break
            place = accepted[0]


def rows_of(batch: Batch) -> Iterator[Row]:
    """Yield the rows of a batch in order."""
    ids = batch.input_ids.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    columns = (batch.rows.tolist(), batch.q_start.tolist(), batch.q_len.tolist())
    for s, start, n in zip(*columns, strict=True):
        own = slice(start, start + n)
        yield Row(s, start, ids[own], [0, *range(n - 1)] if parents is None else parents[own])
