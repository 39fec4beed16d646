"""The target's token at every position, compared with a per-row reference in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels import NAN_TOKEN
from nanospec.kernels.batch import Batch, iter_rows
from nanospec.kernels.sampling import noise, sample
from nanospec.kernels.sampling.scores import MAX_VOCAB
from nanospec.kernels.speculation import verify
from nanospec.kernels.table import Table
from tests.kernels.batches import (
    S,
    compiled,
    emitted,
    ints,
    make_batch,
    make_table,
    proposal_of,
    random_logits,
    random_table,
)

pytestmark = pytest.mark.usefixtures("poison")  # new memory is filled with NaN


def reference_token(
    x: np.ndarray, drafts: list[int], s: int, position: int, table: Table
) -> tuple[int, bool]:
    """Return the token that request row s draws from logits [V] after these drafts, and whether rounding
    could decide otherwise."""
    columns = {name: value for name, value in table._asdict().items() if isinstance(value, Tensor)}
    p = {name: value[s].double().numpy() for name, value in columns.items() if name != "seed"}
    V, T = len(x), float(p["temperature"])
    if bool(p["penalized"]):
        x = x + p["bias"]
        if position < p["min_len"]:
            x[[int(t) for t in p["stop_ids"] if t >= 0]] = -np.inf
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
        log_e = noise.naive(int(table.seed[s]), position, torch.arange(V)).double().numpy()
        x = np.where(keep, x - T * log_e, -np.inf)
    if V > 1 and (p["penalized"] or T > 0):  # the scores are rounded results, not logits
        second, first = np.partition(x, V - 2)[-2:]
        close |= bool(0 < first - second < 1e-4 * max(1.0, T))
    return int(x.argmax()), close


def check(
    q_len: list[int],
    V: int,
    seed: int,
    implementation: Callable[..., Tensor],
    form: str = "chain",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare all tokens of random rows with the reference, except where rounding decides."""
    rng = random.Random(seed)
    rows = rng.sample([*range(S), *[-1] * len(q_len)], len(q_len))
    base_len = [rng.randint(0, 20) for _ in q_len]
    lengths = [n if s >= 0 else 0 for n, s in zip(q_len, rows)]
    batch = make_batch(lengths, base_len, form != "packed", form == "tree", rows=ints(*rows))
    batch.input_ids.random_(0, V, generator=torch.Generator().manual_seed(seed))
    table = random_table(rng, V)
    logits = random_logits(rng, batch.num_tokens, V, dtype)
    read = [(int(batch.q_start[b]), rows[b]) for b, n in enumerate(lengths) if n]
    if form == "nan" and read:
        logits[read[0][0], rng.randrange(V)] = math.nan
        logits[read[-1][0], rng.randrange(V)] = math.inf
    elif read and V > 1:  # greedy with a tie
        first, s = read[0]
        table.temperature[s], table.penalized[s] = 0.0, False
        logits[first, rng.sample(range(V), 2)] = 100.0
    targets = implementation(logits, table, batch)
    assert (targets.dtype, targets.shape) == (torch.int32, (batch.num_tokens,))
    for row in iter_rows(batch):
        for place in range(len(row.ids)):
            t, drafts = row.start + place, row.drafts_to(place)
            scores, position = logits[t].double().numpy(), int(batch.positions[t]) + 1
            expected, close = reference_token(scores, drafts, row.request, position, table)
            assert close or int(targets[t]) == expected, f"token {t}"


ON_CPU = {"naive": sample.naive, **compiled(native=sample.native)}
IMPLEMENTATIONS = {**ON_CPU, "kernel": sample.launch}


FORMS = ["chain", "packed", "tree", "nan"]


@pytest.mark.parametrize("implementation", ON_CPU, ids=str)
@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from([1, 2, 40, 63, 100]),
    st.integers(0, 1 << 30),
    st.sampled_from(FORMS),
)
def test_cpu_matches_reference(implementation: str, q_len: list[int], V: int, seed: int, form: str) -> None:
    dtype = torch.bfloat16 if implementation == "native" and seed % 2 else torch.float32
    check(q_len, V, seed, ON_CPU[implementation], form, dtype)


@pytest.mark.parametrize("V", [5000, 49152, 50257], ids=lambda V: f"V{V}")
@pytest.mark.parametrize("form", ["chain", "tree"])
@pytest.mark.parametrize("implementation", ON_CPU, ids=str)
def test_cpu_matches_reference_with_large_vocabulary(implementation: str, form: str, V: int) -> None:
    dtypes = [torch.bfloat16, torch.float32] if implementation == "native" else [torch.float32]
    for seed in range(4):
        check([2, 3, 0, 1], V, seed, ON_CPU[implementation], form, dtypes[seed % len(dtypes)])


@pytest.mark.parametrize("V", [1, 63, 1000], ids=lambda V: f"V{V}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernel_matches_reference(V: int, dtype: torch.dtype, form: str) -> None:
    for seed in range(V, V + 3):
        check([2, 0, 3, 1], V, seed, sample.launch, form, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_result_is_independent_of_the_batch(implementation: str) -> None:
    """Tokens are the same alone, in a batch, with K = 0 and as one of 8 positions."""
    V, base, run = (1000 if implementation == "kernel" else 100), 11, IMPLEMENTATIONS[implementation]
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, V, generator=generator)
    ids = torch.randint(0, V, (8,), generator=generator, dtype=torch.int32)
    table = make_table(V, temperature=[1.0, 1.0, 0.0, 0.7], top_p=[1.0, 0.9, 1.0, 0.5], top_k=[0, 0, 9, 30])
    for s in range(S):
        together = run(logits, table, make_batch([8], [base], rows=ints(s), input_ids=ids))
        for i in (0, 5, 7) if implementation == "kernel" else range(8):
            one = make_batch([1], [base + i], rows=ints(s), input_ids=ids[:1])
            assert int(run(logits[i : i + 1], table, one)) == int(together[i])
        crowd = torch.cat((torch.randn(8, V), logits, torch.randn(8, V)))
        forms = [([2, 8, 0], -1), ([8, 8, 8], (s + 2) % S)]
        for lengths, last in forms[:1] if implementation == "kernel" else forms:
            rows = ints((s + 1) % S, s, last)
            three = make_batch(lengths, [3, base, 9], rows=rows, input_ids=ids.repeat(3))
            assert torch.equal(run(crowd, table, three)[8:16], together)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("form", ["chain", "tree", "min_len"])
def test_penalties_count_drafts(form: str, implementation: str) -> None:
    """Penalties ban tokens drafted before a query; stop tokens are masked only below min_len."""
    table, ids = make_table(6, penalized=True, presence=10.0), ints(5, 0, 1, 2)
    batch = make_batch([4], [10], input_ids=ids)
    expected = [0, 1, 2, 3]
    if form == "tree":  # 0 and 1 follow the root, 2 follows 0
        batch = make_batch([4], [10], parents=[0, 0, 0, 1], input_ids=ids)
        expected = [0, 1, 0, 1]
    if form == "min_len":
        # A checkpoint may name an EOS token outside its vocabulary.
        table = make_table(6, penalized=True, min_len=12, stop_ids=[-1, 0, 1 << 28])
        table.stop_ids[:, -1] = 1
        expected = [2, 0, 0, 0]  # for the positions 11, 12, ...
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]).repeat(4, 1)
    assert IMPLEMENTATIONS[implementation](logits, table, batch).tolist() == expected


def num_emitted(targets: Tensor, batch: Batch, table: Table) -> tuple[Tensor, Tensor]:
    """Return the tokens and their number that verification emits for the targets."""
    table = make_table(table.vocab_size, tokens=torch.zeros(S, 1000))
    verdict = verify.naive(targets, batch, table, proposal_of(batch))
    return emitted(verdict), verdict.num_emitted


@pytest.mark.parametrize("implementation", ON_CPU, ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_lazy_sampling_matches_verification(tree: bool, implementation: str) -> None:
    V, Q = 4, 12  # a small vocabulary makes paths deep
    table = make_table(V, temperature=[1.0, 1.0, 0.3, 0.0])
    deepest = drawn = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, V, (S * Q,), generator=generator, dtype=torch.int32)
        batch = make_batch([Q, Q - seed % 3, Q, Q], [5] * S, tree=tree, input_ids=ids)
        logits = torch.randn(S * Q, V, generator=generator)
        full = sample.naive(logits, table, batch)
        if not tree:  # most drafts are accepted
            ids[1:] = torch.where(torch.rand(S * Q - 1, generator=generator) < 0.8, full[:-1], ids[1:])
            full = sample.naive(logits, table, batch)
        lazy = ON_CPU[implementation](logits, table, batch, lazy=True)
        (expected, numbers), (actual, _) = (num_emitted(x, batch, table) for x in (full, lazy))
        assert torch.equal(actual, expected)
        deepest, drawn = max(deepest, int(numbers.max())), drawn + int((full != lazy).sum())
    assert deepest >= 4
    assert drawn > 0  # some targets were not drawn


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_of_masked_tokens_are_ignored(implementation: str, temperature: float) -> None:
    """Even NaN or infinity: all implementations ignore masked tokens."""
    logits = torch.randn(3, 65, generator=torch.Generator().manual_seed(2))
    batch = make_batch([3], rows=ints(1))
    table = make_table(65, temperature=temperature, penalized=True, min_len=9, stop_ids=[[64, 7]] * S)
    expected = sample.naive(logits, table, batch)
    assert bool((expected >= 0).all())
    logits[0, 64], logits[1, 7], logits[2, 64] = math.nan, math.inf, -math.inf
    assert torch.equal(IMPLEMENTATIONS[implementation](logits, table, batch), expected)
    table.min_len[:] = 0
    drawn = IMPLEMENTATIONS[implementation](logits, table, batch).tolist()
    assert drawn[:2] == [NAN_TOKEN, NAN_TOKEN]
    assert drawn[2] >= 0


LIMITS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.02},
    {"top_k": 3000, "top_p": 0.99},
]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("shape", ["peaked", "flat", "few", "ties"])
def test_real_vocabulary_size(shape: str, limits: dict[str, Any]) -> None:
    """Distributions of all shapes, where rounding decides less than one draw in 1e5. The kernel runs on
    peaked ones over several chunks, where most groups are skipped."""
    V, table_of = 50257, partial(make_table, temperature=0.8)
    x = torch.randn(40, V, generator=torch.Generator().manual_seed(7))
    shapes = {"flat": x * 0.01, "peaked": x * 4, "few": x.where(x > 3.5, -math.inf), "ties": (x * 3).round()}
    logits, batch = shapes[shape], make_batch([40], [100], rows=ints(3))
    if "native" in ON_CPU:
        given = logits, table_of(V, **limits), batch
        assert torch.equal(sample.native(*given), sample.naive(*given))
    if shape == "peaked":
        V = 49152 if limits == LIMITS[4] else 5000
        given = logits[:3, :V], table_of(V, **limits), make_batch([3], [10], rows=ints(1))
        assert torch.equal(sample.launch(*given), sample.naive(*given))


@pytest.mark.parametrize("limits", [{"top_k": 20}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.8}], ids=str)
def test_kernel_with_bfloat16_logits(limits: dict[str, Any]) -> None:
    V, Q = 1500, 12
    logits = (torch.randn(Q, V, generator=torch.Generator().manual_seed(6)) * 2).bfloat16()
    batch, table = make_batch([Q], [10], rows=ints(1)), make_table(V, temperature=1.0, **limits)
    assert torch.equal(sample.launch(logits, table, batch), sample.naive(logits.float(), table, batch))


def test_kernel_penalized_scores_exceed_bfloat16_precision() -> None:
    logits = torch.tensor([7.1875, 7.125, 7.09375] + [-30.0] * 97).bfloat16().repeat(16, 1)
    table = make_table(100, temperature=1.0, top_k=2, penalized=True, repetition=0.7, in_prompt=True)
    assert len(set(((logits[0, 1:3].float() / 0.7).view(torch.int32) >> 16).tolist())) == 1
    result = sample.launch(logits, table, make_batch([16], [10], rows=ints(1)))
    assert set(result.tolist()) == {0, 1}


def probabilities(*values: float, rest: int = 0) -> Tensor:
    return torch.cat((torch.tensor(values).log(), torch.full((rest,), -30.0)))


# One token in each of 40 groups, less and less likely; five are at least 0.6 as likely as the first.
FAR_APART = torch.full((4000,), -30.0)
FAR_APART[::100] = -0.12 * torch.arange(40.0)
FIVE = {0, 100, 200, 300, 400}
TIES = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])
TIED: tuple[dict[str, Any], ...] = {"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}

EXACT: dict[str, tuple[Tensor, dict[str, Any], set[int]]] = {  # scores, limits, tokens that may be drawn
    "top_p over what top_k left": (probabilities(0.3, 0.28, 0.22, 0.2), {"top_k": 2, "top_p": 0.5}, {0}),
    "top_p alone": (probabilities(0.3, 0.28, 0.22, 0.2), {"top_p": 0.5}, {0, 1}),
    "top_p of 0 keeps the likeliest": (probabilities(0.2, 0.5, 0.3), {"top_p": 0.0}, {1}),
    "zeros of both signs are equal": (torch.tensor([-1.0, 0.0, -0.0, -2.0]), {"top_k": 1}, {1, 2}),
    "negative scores": (torch.tensor([-9.0, -3.0, -2.5, -4.0]), {"top_k": 2}, {1, 2}),
    "min_p after top_k": (probabilities(0.5, 0.3, 0.2), {"top_k": 2, "min_p": 0.9}, {0}),
    "ties in shut groups": (torch.zeros(3000), {"top_k": 2}, set(range(3000))),
    "top_p of a flat distribution": (torch.zeros(3000), {"top_p": 0.3}, set(range(3000))),
    "whole chunks without a score": (probabilities(*[0.0] * 2500, 0.4, 0.6), {"top_p": 0.5}, {2501}),
    "few in many groups": (probabilities(0.3, 0.3, 0.4, rest=4000), {"top_p": 0.8}, {0, 1, 2}),
    "all three in many groups": (FAR_APART, {"top_k": 30, "top_p": 0.125, "min_p": 0.6}, {0, 100}),
    "top_k in many groups": (FAR_APART, {"top_k": 25}, {*range(0, 2500, 100)}),
    "min_p with top_k in many groups": (FAR_APART, {"top_k": 25, "min_p": 0.6}, FIVE),
    "min_p in many groups": (FAR_APART, {"min_p": 0.6}, FIVE),
    **{f"ties at {limits}": (TIES, limits, {1, 2, 3}) for limits in TIED},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_filters_keep_exact_set(case: str, implementation: str) -> None:
    scores, limits, allowed = EXACT[case]
    V, Q = len(scores), 8
    table = make_table(V, temperature=1.0, **limits)
    logits, batch = scores.expand(Q, V), make_batch([Q], [10], rows=ints(2))
    drawn = IMPLEMENTATIONS[implementation](logits.contiguous(), table, batch)
    assert torch.equal(drawn, sample.naive(logits, table, batch))
    assert set(drawn.tolist()) <= allowed
    assert len(allowed) > 2 or set(drawn.tolist()) == allowed


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("limits", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}], ids=str)
def test_ties_and_non_finite_logits_anywhere(limits: dict[str, Any], implementation: str) -> None:
    """In one or several chunks of the vocabulary, with greedy and sampling rows."""
    V, Q = 4100, 6
    logits = torch.zeros(Q, V)
    logits[0, [40, 50]] = logits[1, [100, 4099]] = 30.0  # ties in a chunk and across chunks
    logits[2, 4099], logits[3, 2500], logits[4] = math.nan, math.inf, -math.inf
    logits[5, 0] = logits[5, 1] = math.nan
    batch, table = make_batch([Q], [3]), make_table(V, **limits)
    result = IMPLEMENTATIONS[implementation](logits, table, batch).tolist()
    assert result[2:] == [-1] * 4
    assert result[:2] == [40, 100] if not limits else (result[0] in (40, 50) and result[1] in (100, 4099))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_padding_is_ignored(implementation: str) -> None:
    """Padding rows read and draw nothing, whatever their logits."""
    logits = torch.full((4, 100), math.nan)
    logits[:2] = torch.randn(2, 100)
    table = make_table(100)
    ids = torch.full((4,), 10**9, dtype=torch.int32)
    batch = make_batch([2, 0], [4, 0], rows=ints(0, -1), input_ids=ids)
    targets = IMPLEMENTATIONS[implementation](logits, table, batch)
    assert torch.equal(targets[:2].long(), logits[:2].argmax(-1))


def test_kernel_rejects_large_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocabulary size 262145 exceeds"):
        sample.launch(torch.zeros(1, 1).expand(1, MAX_VOCAB + 1), make_table(7), make_batch([1], [5]))
