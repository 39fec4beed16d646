"""What the request rows ask of further sampling parameters, and the logits as those want them.

The values lie on the device, a column per parameter, made when a request first asks for it: what nobody has
asked for takes no memory and no time. A step changes logits where its own rows ask, before all that reads
them: sampling, the further rules of acceptance and log-probabilities see the same.

Recorded steps with and without are recordings apart (`graphs.py`): the first step that asks makes its own.

A row's bits must not depend on what is scored beside it. What PyTorch adds up does depend on the shape that
it gets, so every call has the same: one position on a CPU, on a GPU `ROWS` of them, padded. (There sums may
still differ if the vocabulary is no multiple of 4: rows then begin at unlike addresses.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device.admission import HostWrites
from ..kernels.batch import Batch
from ..kernels.table import Table
from .base import PARAMETERS

ROWS = 16  # positions that are changed at once on a GPU


class ExtraRows:
    """The values of further sampling parameters, by request row.

    Attributes:
        columns: [S] float32 by name, in the order in which they were first asked for.
        may_wait: whether steps are not captured, and may read which rows ask.
    """

    def __init__(self, table: Table, may_wait: bool) -> None:
        self.table, self.may_wait = table, may_wait
        self.columns: dict[str, Tensor] = {}
        self._asking: set[int] = set()
        self._at_once = 1 if table.device.type == "cpu" else ROWS

    def admit(self, writes: HostWrites, row: int, asked: Mapping[str, float]) -> None:
        """A request that asks for this took the row."""
        asked = {name: value for name, value in asked.items() if value != PARAMETERS[name].default}
        for name in sorted(asked.keys() - self.columns.keys()):
            shape, default = (self.table.num_rows,), PARAMETERS[name].default
            self.columns[name] = torch.full(shape, default, dtype=torch.float32, device=self.table.device)
        for name, column in self.columns.items():
            writes.set(column, row, asked.get(name, PARAMETERS[name].default))
        (self._asking.add if asked else self._asking.discard)(row)

    def asked_by(self, rows: Sequence[int]) -> int:
        """How many parameters a step of these rows applies: all there are, or 0 if none of the rows asks."""
        return len(self.columns) if self._asking and not self._asking.isdisjoint(rows) else 0

    def change(self, logits: Tensor, batch: Batch) -> None:
        """Change logits [T, V] in place, in their own dtype, where the rows of the batch ask."""
        place = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        b = torch.searchsorted(batch.q_start, place, right=True) - 1  # whose token it is
        s = batch.rows[b].clamp(min=0)
        values = {name: self.columns[name][s, None] for name in sorted(self.columns)}  # [T, 1]
        if self.may_wait:
            asks = [value != PARAMETERS[name].default for name, value in values.items()]
            place = torch.stack(asks).any(0).squeeze(1).nonzero().squeeze(1).int()
        for part in place.split(self._at_once):
            own = {name: value[part] for name, value in values.items()}
            changed = self._changed(logits[part].float(), s[part], batch.positions[part] + 1, own)
            logits[part] = changed.to(logits.dtype)

    def _changed(self, block: Tensor, s: Tensor, position: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Logits [n, V] of some tokens, which draw for `position` [n] of the request rows `s` [n]."""
        missing = self._at_once - len(block)
        for name, value in values.items():
            parameter = PARAMETERS[name]
            logits = F.pad(_without_barred(block, s, position, self.table), (0, 0, 0, missing))
            changed = parameter.change(logits, F.pad(value, (0, 0, 0, missing), value=parameter.default))
            if changed.shape != logits.shape:
                shapes = f"{list(changed.shape)} for {list(logits.shape)}"
                raise ValueError(f"{name}.change must give logits of the shape it got, not {shapes}.")
            block = torch.where(value != parameter.default, changed[: len(block)].float(), block)
        return block


def _without_barred(logits: Tensor, s: Tensor, position: Tensor, table: Table) -> Tensor:
    """With stop tokens that may not come yet as the least likely: else they might be all that is left."""
    stops = table.stop_ids[s].long()  # [n, stops]
    barred = (position < table.min_len[s])[:, None] & (stops >= 0) & (stops < logits.shape[1])
    least = torch.where(barred, logits.amin(-1, keepdim=True), float("inf"))
    return logits.scatter_reduce(1, torch.where(barred, stops, 0), least, "amin")
