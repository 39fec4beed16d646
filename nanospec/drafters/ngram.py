"""N-gram lookup as a drafter."""

from torch import Tensor

from ..config import SpecConfig
from ..kernels.speculation import ngram
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from . import Drafter, Target


class NgramDrafter(Drafter):
    """Looks up the last n tokens in the row's own text; see `kernels/speculation/ngram.py`."""

    name = "ngram"
    makes_trees = True

    def __init__(self, spec: SpecConfig) -> None:
        self.max_n, self.width = spec.prompt_lookup_max, spec.tree_width

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "NgramDrafter":
        return cls(spec)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        return ngram.propose(table, rows, k, self.max_n, self.width)
