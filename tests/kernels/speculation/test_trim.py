"""The number of drafts to verify: validity, comparison with a search over thresholds, and probes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels import STOPPED
from nanospec.kernels.speculation import trim
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.trim import Estimates
from tests.kernels.batches import compiled, ints, make_table

pytestmark = pytest.mark.usefixtures("poison")

LEAST, MOST = -(2**31), 2**31 - 1
Trim = Callable[..., Tensor]
IMPLEMENTATIONS: dict[str, Trim] = {
    "naive": trim.naive,
    **compiled(native=trim.native),
    "kernel": trim.launch,
}


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_invalid_drafts_are_dropped(implementation: str, tree: bool) -> None:
    """A custom drafter may return any integers, which must not become addresses."""
    table = make_table(100, num_rows=12)
    table.num_tokens[:], table.max_len[:] = 5, 40
    table.max_len[:3] = ints(5, 6, 8)  # full, only the target's token fits, two drafts fit
    drafts, parents = torch.full((14, 4), 99, dtype=torch.int32), ints(0, 1, 2, 3).repeat(14, 1)
    drafts[:, 1] = 0
    drafts[3, 2], drafts[4, 0], drafts[5, 3] = 100, -1, MOST
    for row, (place, parent) in enumerate([(0, 1), (1, 2), (2, -5), (3, MOST), (1, LEAST), (2, 10**6)], 6):
        parents[row, place] = parent
    rows, count = torch.arange(14, dtype=torch.int32), torch.full((14,), 4, dtype=torch.int32)
    rows[12:], table.finished[0] = ints(-1, 0), STOPPED
    rows[0], count[11] = -1, -7
    given = Proposal(drafts, count, drafts, count, count, parents if tree else None)
    q_len = IMPLEMENTATIONS[implementation](table, rows, given, None)
    assert q_len.tolist() == [0, 1, 3, 3, 1, 4, *((1, 2, 3, 4, 2) if tree else [5] * 5), 1, 0, 0]
    assert q_len.dtype == torch.int32
    none = Proposal(drafts[:, :0], count, drafts[:, :0], count, count)
    assert IMPLEMENTATIONS[implementation](table, rows, none, None).tolist() == [0] + [1] * 11 + [0, 0]


def example(
    rows: list[tuple[int, int]], first: list[float], further: float = 0.8, costs: tuple[float, ...] = (0.5,),
    **numbers: float,
) -> tuple[Proposal, Estimates]:  # fmt: skip
    """Return a proposal and estimates for rows of (number of drafts, match length). `costs`: ms that each
    token adds from token 1, 9, 17, ... on."""
    B, k = len(rows), max(1, *(n for n, _ in rows))
    columns = torch.tensor(rows, dtype=torch.int32)
    drafts = torch.zeros(B, k, dtype=torch.int32)
    _, e = Estimates.empty(2, B, "cpu")
    e.base_ms.fill_(10.0)
    for i, slope in enumerate(costs):
        e.cost_at[i], e.cost_slope[i] = 1 + 8 * i, slope - (costs[i - 1] if i else 0)
    e.first[0], e.further[0] = torch.tensor(first), further
    e.margin.fill_(1e9)
    for tensor in (e.keep_unmatched, e.keep_matched, e.shared, e.own, e.accepted):
        tensor.zero_()
    for name, value in numbers.items():
        getattr(e, name).fill_(value)
    return Proposal(
        drafts, columns[:, 0].contiguous(), drafts, columns[:, 1].contiguous(), drafts[:, 0].contiguous()
    ), e


def ms_of(e: Estimates, n: int) -> float:
    return float(e.base_ms) + sum(
        s * max(n - at, 0) for at, s in zip(e.cost_at.tolist(), e.cost_slope.tolist())
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=7),
    st.lists(st.floats(0.0, 1.5), min_size=9, max_size=9),
    st.floats(0.0, 1.0),
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=3),
    st.sampled_from([1e9, 1.0, 0.0]),
)
def test_speed_is_that_of_the_best_threshold(
    implementation: str,
    rows: list[tuple[int, int]],
    first: list[float],
    further: float,
    costs: list[float],
    margin: float,
) -> None:
    proposal, e = example(rows, first, further, tuple(costs), margin=margin, shared=0.2, own=5.0)
    q_len = IMPLEMENTATIONS[implementation](
        make_table(1000, num_rows=len(rows)), torch.arange(len(rows)).int(), proposal, e
    )
    chances = [[min(first[min(m, 8)], 1.0) * further**i for i in range(n)] for n, m in rows]
    kept = [row[: n - 1] for row, n in zip(chances, q_len.tolist())]
    least, B = min(sum(row) for row in chances), len(rows)

    def speed(chosen: list[list[float]], slack: float = 1e-4) -> float:
        count, gain = sum(map(len, chosen)), sum(map(sum, chosen))
        fits = not count or ms_of(e, B + count) - ms_of(e, B) <= 0.2 * gain + 5.0 * least + margin + slack
        return (B + gain) / ms_of(e, B + count) if fits else 0.0

    thresholds = [i / 31 for i in range(1, 33)]
    best = max(speed([[c for c in row if c >= t] for row in chances], -1e-4) for t in thresholds)
    assert speed(kept) >= best * (1 - 1e-5)
    assert (
        min(map(min, filter(None, kept)), default=1.0)
        >= max((row[n - 1] for row, n in zip(chances, q_len.tolist()) if n <= len(row)), default=0.0) - 1e-5
    ), "a less likely draft is verified"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_limits_of_estimates(implementation: str) -> None:
    def counts(proposal: Proposal, e: Estimates, k: int = 4) -> list[int]:
        B = len(proposal.drafts)
        q_len = IMPLEMENTATIONS[implementation](
            make_table(1000, num_rows=B), torch.arange(B).int(), proposal, e
        )
        return (q_len - 1).tolist()

    rows, good = [(4, 0), (0, 0), (4, 3), (4, 8)], [0.9] * 9
    free, steep = (0.01,), (30.0,)
    assert counts(*example(rows, good, costs=free)) == [4, 0, 4, 4]
    assert counts(*example(rows, good, costs=steep)) == [0, 0, 0, 0]
    assert counts(*example(rows, good, costs=steep, keep_unmatched=3.0)) == [3, 0, 0, 0]
    assert counts(*example(rows, good, costs=steep, keep_matched=2.0)) == [0, 0, 2, 2]
    probed = [counts(*example(rows, good, costs=steep, probe=float(turn))) for turn in range(4)]
    assert probed == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert counts(*example(rows, good, costs=free, probe=1.0)) == [4, 0, 4, 4]
    # A row without drafts, now and on average, allows none of others, unless these save it time.
    assert counts(*example(rows, good, costs=(0.1,), margin=0.0, own=5.0)) == [0, 0, 0, 0]
    assert counts(*example(rows, good, costs=(0.1,), margin=0.0, own=5.0, accepted=1.0)) == [4, 0, 4, 4]
    assert counts(*example(rows, good, costs=(0.1,), margin=0.0, shared=2.0)) == [4, 0, 4, 4]
    proposal, e = example(rows, good, costs=free)
    e.factor[2, 1], e.factor[0, 0] = 0.01, 0.01
    assert counts(proposal, e) == [0, 0, 0, 4]
    e.first[1] = 0.0
    assert counts(proposal._replace(drafter=ints(0, 0, 0, 1)), e) == [0, 0, 0, 0]
    assert counts(proposal._replace(drafter=ints(-1, 0, 0, 99)), e) == [0, 0, 0, 0], "codes are limited"
