"""The target's token at every position, compared with a per-row reference in float64."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels.batch import draft_trees
from nanospec.kernels.sampling import noise, sample
from nanospec.kernels.sampling.scores import MAX_VOCAB
from nanospec.kernels.table import Table
from tests.kernels.batches import S, compiled, ints, make_batch, make_table, random_logits, random_table, real

pytestmark = pytest.mark.usefixtures("poison")


def target_token(x: np.ndarray, drafts: list[int], s: int, position: int, table: Table) -> tuple[int, bool]:
    """Return the token that request row s draws from logits [V] after these drafts, and whether rounding
    could change it."""
    columns = {name: value for name, value in table._asdict().items() if isinstance(value, Tensor)}
    p = {name: value[s].double().numpy() for name, value in columns.items() if name != "seed"}
    V, T = len(x), float(p["temperature"])
    if bool(p["penalized"]):
        x = x + p["bias"]
        if position < p["min_len"]:
            x[[int(t) for t in p["stop_ids"] if 0 <= t < V]] = -np.inf
        count = p["output_counts"] + np.bincount(drafts, minlength=V)
        repeated = np.where(x > 0, x / p["repetition"], x * p["repetition"])
        x = np.where((count > 0) | (p["in_prompt"] > 0), repeated, x)
        x = x - p["frequency"] * count - p["presence"] * (count > 0)
    if np.isnan(x).any() or np.isinf(x.max()):
        return -1, False
    close = False
    if T > 0:
        higher = np.searchsorted(np.sort(-x), -x)  # number of scores above each
        keep = higher < p["top_k"] if 0 < p["top_k"] < V else np.ones(V, dtype=bool)
        weight = np.where(keep, np.exp((x - x.max()) / T), 0.0)
        if p["top_p"] < 1:
            above = np.append(0, np.sort(weight)[::-1].cumsum())[higher] / weight.sum()
            close |= bool((np.abs(above - p["top_p"]) < 1e-5).any())
            keep &= (above < p["top_p"]) | (x == x.max())
        if p["min_p"] > 0:
            ratio = np.exp((x - x.max()) / T) / p["min_p"]
            close |= bool((np.abs(ratio - 1) < 1e-4).any())
            keep &= ratio >= 1
        if p["penalized"] and not keep.all():  # rounding may decide which of nearly equal scores are kept
            close |= bool(x[keep].min() - x[~keep].max() < 1e-5)
        log_e = noise.naive(int(table.seed[s]), position, torch.arange(V)).double().numpy()
        x = np.where(keep, x - T * log_e, -np.inf)
    if V > 1 and (p["penalized"] or T > 0):  # the scores are rounded results, not logits
        second, first = np.partition(x, V - 2)[-2:]
        close |= bool(0 < first - second < 1e-4 * max(1.0, T))
    return int(x.argmax()), close


ON_CPU = {"naive": sample.naive, **compiled(native=sample.native)}
IMPLEMENTATIONS = {**ON_CPU, "kernel": sample.launch}


def check(
    q_len: list[int], V: int, seed: int, which: str, form: str, dtype: torch.dtype = torch.float32
) -> None:
    """Compare all tokens of random rows with the reference, except where rounding decides. A lazy sample
    draws only the tokens on the path of verification."""
    rng = random.Random(seed)
    rows = rng.sample([*range(S), *[-1] * len(q_len)], len(q_len))
    base_len = [rng.randint(0, 20) + (seed % 3 == 1) * 100_000 for _ in q_len]  # also beyond 16 bits
    lengths = [n if s >= 0 else 0 for n, s in zip(q_len, rows)]
    batch = make_batch(lengths, base_len, form != "packed", form == "tree", rows=ints(*rows))
    batch.input_ids.random_(0, V, generator=torch.Generator().manual_seed(seed))
    table = random_table(rng, V)
    table.stop_ids[:, -2:] = ints(1 << 28, V // 3)  # also an EOS token outside the vocabulary
    logits = random_logits(rng, batch.num_tokens, V, dtype)
    if form == "tree" and seed % 2:  # the drafts of the path are the most likely tokens
        table.penalized[:], table.presence[:], table.output_counts[:] = True, -50.0, 0
    padding = torch.ones(batch.num_tokens, dtype=torch.bool)
    padding[real(batch)] = False
    logits[padding], batch.input_ids[padding] = math.nan, 10**9
    read = [(int(batch.q_start[b]), rows[b]) for b, n in enumerate(lengths) if n]
    if form == "nan" and read:  # masked tokens may be NaN
        logits[read[-1][0], rng.randrange(V)] = rng.choice([math.inf, math.nan])
        first, s = read[0]
        logits[first, V // 3], table.penalized[s] = math.nan, True
        table.min_len[s] = int(batch.positions[first]) + rng.choice([1, 2])  # 2: the stop token is masked
    elif read and V > 1:  # greedy with a tie
        first, s = read[0]
        table.temperature[s], table.penalized[s] = 0.0, False
        logits[first, rng.sample(range(V), 2)] = 100.0
    lazy = which in ON_CPU and rng.random() < 0.5
    targets = IMPLEMENTATIONS[which](logits, table, batch, **({"lazy": True} if lazy else {}))
    assert (targets.dtype, targets.shape) == (torch.int32, (batch.num_tokens,))
    for tree in draft_trees(batch):
        path = [*tree.walk(targets)] if lazy else [*range(len(tree.ids))]
        for place in path:
            t, drafts = tree.start + place, tree.drafts_to(place)
            scores, position = logits[t].double().numpy(), int(batch.positions[t]) + 1
            expected, close = target_token(scores, drafts, tree.row, position, table)
            assert close or int(targets[t]) == expected, f"token {t}"
        if which == "native":
            own = targets[tree.start : tree.start + len(tree.ids)].tolist()
            assert not any(token for place, token in enumerate(own) if place not in path)


FORMS = ["chain", "packed", "tree", "nan"]


@pytest.mark.parametrize("implementation", ON_CPU)
@settings(max_examples=100)
@example([3, 0, 0, 0], 3, 2, "nan")  # penalties that differ by rounding
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 40, 63, 100, 5000]),
    st.integers(0, 1 << 30),
    st.sampled_from(FORMS),
)
def test_cpu_matches_reference(implementation: str, q_len: list[int], V: int, seed: int, form: str) -> None:
    dtype = torch.bfloat16 if implementation == "native" and seed % 2 else torch.float32
    check(q_len, V, seed, implementation, form, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_kernel_matches_reference(form: str) -> None:
    """All other parameters vary with the seeds of `random_logits` and `random_table`."""
    dtypes = torch.float32, torch.float16, torch.bfloat16
    cases = [(1, [1, 2]), *[(63, [2, 0, 3, 1])] * 3, (100, [3, 2, 1, 1]), (1000, [1, 2])]
    for i, (V, q_len) in enumerate(cases):
        check(q_len, V, i + 10 * FORMS.index(form), "kernel", form, dtypes[i % 3])


LIMITS: dict[str, Any] = {  # by request row
    "temperature": [0.0, 0.8, 0.8, 0.8, 0.8, 0.8],
    "top_k": [0, 0, 0, 20, 0, 3000],
    "top_p": [1.0, 1.0, 0.9, 0.95, 1.0, 0.99],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.02, 0.0],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["peaked", "flat", "few", "ties"])
def test_real_vocabulary_size(shape: str) -> None:
    """Test all shapes of distributions; rounding changes less than one draw in 1e5. The kernel runs on peaked
    distributions over several chunks, where it skips most groups."""
    V, R, Q = 50257, len(LIMITS["top_k"]), 6
    x = torch.randn(R * Q, V, generator=torch.Generator().manual_seed(7))
    shapes = {"flat": x * 0.01, "peaked": x * 4, "few": x.where(x > 3.5, -math.inf), "ties": (x * 3).round()}
    logits, table = shapes[shape], make_table(V, num_rows=R, **LIMITS)
    if "native" in ON_CPU:
        given = logits, table, make_batch([Q] * R, [100] * R)
        assert torch.equal(sample.native(*given), sample.naive(*given))
    if shape == "peaked":
        for vocab, s in ((V, 3), (5000, 5)):
            limits = make_table(vocab, num_rows=R, **LIMITS)
            given = logits[:1, :vocab], limits, make_batch([1], [10], rows=ints(s))
            assert torch.equal(sample.launch(*given), sample.naive(*given))


def test_kernel_penalized_scores_exceed_bfloat16_precision() -> None:
    logits = torch.tensor([7.1875, 7.125, 7.09375] + [-30.0] * 97).bfloat16().repeat(8, 1)
    table = make_table(100, temperature=1.0, top_k=2, penalized=True, repetition=0.7, in_prompt=True)
    assert len(set(((logits[0, 1:3].float() / 0.7).view(torch.int32) >> 16).tolist())) == 1
    result = sample.launch(logits, table, make_batch([8], [20], rows=ints(1)))
    assert set(result.tolist()) == {0, 1}


def probabilities(*values: float, rest: int = 0) -> Tensor:
    return torch.cat((torch.tensor(values).log(), torch.full((rest,), -30.0)))


# One token in each of 40 groups, less and less likely; five are at least 0.6 as likely as the first.
FAR_APART = torch.full((4000,), -30.0)
FAR_APART[::100] = -0.12 * torch.arange(40.0)
FIVE = {0, 100, 200, 300, 400}
FOUR = probabilities(0.3, 0.28, 0.22, 0.2)
CLOSE = 16 + torch.arange(3000) / 3000  # the keys of all groups share their first digits
TIES = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])

Exact = tuple[Tensor, dict[str, Any], set[int]]  # scores, limits, tokens that may be drawn
CASES: dict[str, Exact] = {
    "top_p over what top_k left": (FOUR, {"top_k": 2, "top_p": 0.5}, {0}),
    "top_p alone": (FOUR, {"top_p": 0.5}, {0, 1}),
    "top_p of 0 keeps the likeliest": (FOUR, {"top_p": 0.0}, {0}),
    "zeros of both signs are equal": (torch.tensor([-1.0, 0.0, -0.0, -2.0]), {"top_k": 1}, {1, 2}),
    "ties at top_k": (TIES, {"top_k": 2}, {1, 2, 3}),
    "ties at top_p": (TIES, {"top_p": 0.4}, {1, 2, 3}),
    "ties in shut groups": (torch.zeros(3000), {"top_k": 2}, set(range(3000))),
    "ties in shut groups at top_p of 0": (torch.zeros(3000), {"top_p": 0.0}, set(range(3000))),
    "top_k of close scores": (CLOSE, {"top_k": 3}, {2997, 2998, 2999}),
    "top_p of close scores": (CLOSE, {"top_p": 0.0012}, {2997, 2998, 2999}),
    "fewer tokens than top_k": (TIES, {"top_k": 20, "top_p": 0.97}, {1, 2, 3}),
    "top_p of a flat distribution": (torch.zeros(3000), {"top_p": 0.3}, set(range(3000))),
    "whole chunks without a score": (probabilities(*[0.0] * 2500, 0.4, 0.6), {"top_p": 0.5}, {2501}),
    "few in many groups": (probabilities(0.3, 0.3, 0.4, rest=3990), {"top_p": 0.8}, {0, 1, 2}),
    "all three in many groups": (FAR_APART, {"top_k": 30, "top_p": 0.125, "min_p": 0.6}, {0, 100}),
    "top_k in many groups": (FAR_APART, {"top_k": 25}, {*range(0, 2500, 100)}),
    "more than all groups": (FAR_APART, {"top_k": 90, "top_p": 0.125}, {0, 100}),
    "min_p with top_k in many groups": (FAR_APART, {"top_k": 25, "min_p": 0.6}, FIVE),
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_filters_keep_exact_set(implementation: str) -> None:
    """Each case is a request row; shorter scores are padded with -inf."""
    R, V, Q = len(CASES), 4000, 1 if implementation == "kernel" else 8
    table, logits = make_table(V, num_rows=R, temperature=1.0), torch.full((R, Q, V), -math.inf)
    for s, (scores, limits, _) in enumerate(CASES.values()):
        logits[s, :, : len(scores)] = scores
        for name, value in limits.items():
            getattr(table, name)[s] = value
    given = logits.flatten(0, 1), table, make_batch([Q] * R, [10] * R)
    result = IMPLEMENTATIONS[implementation](*given)
    assert torch.equal(result, sample.naive(*given))
    for (name, (_, _, allowed)), drawn in zip(CASES.items(), result.view(R, Q).tolist()):
        assert set(drawn) <= allowed, name
        assert len(allowed) > 2 or Q < 8 or set(drawn) == allowed, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_and_non_finite_logits_anywhere(implementation: str) -> None:
    """Test one and several chunks of the vocabulary, with greedy, sampling and filtering rows."""
    V, Q = 4100, 6
    logits = torch.zeros(Q, V)
    logits[0, [40, 50]] = logits[1, [100, 4099]] = 30.0  # ties in a chunk and across chunks
    logits[2, 4099], logits[3, 2500], logits[4] = math.nan, math.inf, -math.inf
    logits[5, 0] = logits[5, 1] = math.nan
    table = make_table(V, temperature=[0.0, 1.0, 1.0, 1.0], top_k=[0, 0, 2, 0])
    batch = make_batch([Q] * 3, [3] * 3)
    result = IMPLEMENTATIONS[implementation](logits.repeat(3, 1), table, batch).view(3, Q).tolist()
    assert result[0][:2] == [40, 100]
    for row in result:
        assert (row[0] in (40, 50), row[1] in (100, 4099), row[2:]) == (True, True, [-1] * 4)


def test_kernel_rejects_large_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocabulary size 262145 exceeds"):
        sample.launch(torch.zeros(1, 1).expand(1, MAX_VOCAB + 1), make_table(7), make_batch([1], [5]))
