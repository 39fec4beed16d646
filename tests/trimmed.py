"""The number of drafts that a step verifies by the estimates of a policy."""

from collections.abc import Sequence

import torch

from nanospec.drafters.policy import Choice
from nanospec.kernels import NO_DRAFTER
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.trim import Estimates, trim
from tests.kernels.batches import make_table


def count_verified(
    choice: Choice, drafts: Sequence[int], match: Sequence[int], drafter: int = 0, num_drafters: int = 1
) -> list[int]:
    """Return how many of the drafts of batch rows 0, 1, ... with these match lengths are verified."""
    estimates = Estimates.of(torch.tensor(choice.estimates), num_drafters) if choice.estimates else None
    counts, lengths = (torch.tensor(values, dtype=torch.int32) for values in (drafts, match))
    ids = torch.zeros(len(drafts), max(1, *drafts), dtype=torch.int32)
    by = torch.where(counts > 0, drafter, NO_DRAFTER).int()
    table, rows = make_table(100, num_rows=len(drafts)), torch.arange(len(drafts), dtype=torch.int32)
    return (trim(table, rows, Proposal(ids, counts, ids, lengths, by), estimates) - 1).tolist()
