"""What trees are expected to give, and the K that follows."""

from __future__ import annotations

import random

import pytest

from nanospec.drafters.costs import StepCosts
from nanospec.drafters.policy import AutoPolicy
from nanospec.drafters.tree_estimator import EXPECTED, TreeEstimator

KS = (0, 1, 2, 4, 8, 16)
FALLING = [0.6 / (i + 1) for i in range(16)]


def test_before_anything_is_known_trees_promise_what_they_give_on_real_text() -> None:
    tokens = TreeEstimator().tokens([(3, 63)], KS)
    assert tokens[:3] == pytest.approx([1, 1 + EXPECTED, 1 + 1.5 * EXPECTED])
    assert tokens == sorted(tokens)


def test_rows_add_up_and_keep_to_their_limits() -> None:
    trees = TreeEstimator()
    trees.observe(0, [0.5, 0.25])
    assert trees.tokens([(0, 2), (1, 0)], (0, 1, 2, 8)) == pytest.approx([2, 2.5, 2.75, 2.75])


def test_what_a_row_says_of_its_nodes_is_believed() -> None:
    """Also of places that it has not reached, in proportion."""
    trees = TreeEstimator()
    for _ in range(30):
        trees.observe(0, [0.9, 0.8])
        trees.observe(1, [0.1])
    good, bad = (trees.tokens([(row, 63)], (2, 16)) for row in (0, 1))
    assert good[0] == pytest.approx(2.7)
    assert good[1] > 3.5
    assert bad[1] < 1.4
    trees.reset(0)
    assert trees.tokens([(0, 63)], (2,)) == trees.tokens([(5, 63)], (2,)) != [good[0]]


def test_the_latest_steps_count_most() -> None:
    trees = TreeEstimator()
    for chance in [0.1] * 20 + [0.9] * 10:
        trees.observe(0, [chance])
    assert trees.tokens([(0, 63)], (1,))[0] == pytest.approx(1.9, abs=0.1)


@pytest.mark.parametrize(("per_node", "least", "most"), [(0.001, 16, 16), (0.08, 2, 8), (0.7, 0, 1)])
def test_k_is_what_the_nodes_are_worth_and_cost(per_node: float, least: int, most: int) -> None:
    """Nodes that cost nearly nothing are all taken, dear ones only as far as they pay."""
    policy = AutoPolicy(StepCosts({1: {k: 1 + per_node * k for k in KS}}))
    chosen = []
    for _ in range(60):
        k = policy.choose([0], [16])
        chosen.append(k)
        if k:
            policy.observe(0, 0, 0, k, 1, FALLING[:k])
    assert least <= sorted(chosen[10:])[len(chosen[10:]) // 2] <= most


def test_where_no_nodes_were_found_none_are_expected() -> None:
    """A tree smaller than was asked for had no more to guess; one that was cut to size may have."""
    trees = TreeEstimator()
    for _ in range(40):
        trees.observe(0, [0.5], asked=4)
        trees.observe(1, [0.5], asked=1)
        trees.observe(2, [], asked=4)
    full, cut, empty = (trees.tokens([(row, 63)], (4,))[0] for row in range(3))
    assert full == pytest.approx(1.5, abs=0.01)
    assert cut > 1.5
    assert empty == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("more", "runs"), [(0.0, False), (0.1, False), (0.7, True)])
def test_a_model_is_run_for_a_tree_if_the_tree_is_better_for_it(more: float, runs: bool) -> None:
    """By what it adds (here to the first node), whatever is accepted. Other chances change too."""
    costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, passes: 2.0 * bool(passes))
    policy, ran, rng = AutoPolicy(costs, model=1), [], random.Random(3)
    for _ in range(300):
        k = policy.passes([0], 0, policy.choose([0], [8]))
        chances = sorted((0.3 * rng.random() for _ in range(8)), reverse=True)
        chances[0] += more if k else 0.0
        [n] = policy.cut([0], [1 if k else 0], [8], [0], [chances])
        policy.observe(0, 1 if k else 0, 0, n, n, chances[:n])
        ran.append(k > 0)
    assert sum(ran[100:]) > 160 if runs else sum(ran[100:]) < 40
    assert 0 < sum(ran) < 300


def test_steps_of_which_the_model_was_not_part_say_nothing_of_it() -> None:
    """Where no row may draft nobody asks for `passes`, and what a grammar guesses is none of its doing."""
    costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, passes: 2.0 * bool(passes))
    policy = AutoPolicy(costs, model=1)
    for step in range(60):
        if step < 20:
            policy.passes([0], 0, policy.choose([0], [8]))
            policy.cut([0], [1], [1], [0], [[0.3]])
            policy.observe(0, 1, 0, 1, 0, [0.3])
            before = policy._in_trees.prefers()
        else:
            policy.choose([0], [8])
            policy.cut([0], [2], [8], [3], [[-1.0] * 8])
    assert policy._in_trees.prefers() == before


def test_rows_that_say_nothing_are_estimated_as_chains() -> None:
    """A row with a tree beside one whose chains are never right."""
    policy = AutoPolicy(StepCosts({2: {k: 1 + 0.05 * k for k in KS}}))
    chosen = []
    for _ in range(200):
        k = policy.choose([0, 1], [16, 16])
        chosen.append(k)
        if k:
            policy.observe(0, 0, 0, 0, 0, asked=k)
            policy.observe(1, 0, 0, k, 0)
    assert chosen[100:].count(0) > 85
