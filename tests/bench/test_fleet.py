"""The fleet on paper: nothing is lost or made up, and it agrees with what can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import fleet as command
from bench.scale import paper, questions
from bench.scale.costs import Costs
from bench.scale.fleet import Fleet
from bench.scale.guessing import KS, Guessing, brought, captured
from bench.scale.replica import Cache, Replica
from bench.scale.routing import ROUTERS, by_prefix, least_loaded
from bench.scale.runs import Bounds, Setup, capacity, figures
from bench.scale.workload import NO_PREFIX, SHAPES, Request, Workload
from bench.traces import synthetic
from nanospec.apps.cli.account import Machine, account, prefill
from nanospec.apps.cli.shapes import SHAPES as MODELS

EIGHT = Costs(MODELS["qwen3-8b"])
PLAIN = dict.fromkeys(KS, 1.0)  # drafts that are never right
HALF = {k: sum(0.5**j for j in range(k + 1)) for k in KS}
NEVER = Guessing([PLAIN], 0)


def small(capacity: int, guessing: Guessing = NEVER, **options: int) -> Replica:
    """With a cache of so many tokens."""
    costs = Costs(MODELS["qwen3-8b"])
    costs.kv_tokens = capacity
    return Replica(costs, guessing, **options)  # type: ignore[arg-type]


# ---- costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(("rows", "k"), [(1, 0), (7, 3), (256, 1)])
def test_a_step_costs_what_the_account_says(rows: int, k: int, gpus: int) -> None:
    costs = Costs(MODELS["qwen3-8b"], gpus=gpus)
    exact = account(costs.config, rows, k, 1700, gpus=gpus).estimate(Machine())
    assert costs.step(rows, k, rows * 1700) == pytest.approx(exact, rel=1e-9)


def test_passes_of_many_tokens_add_in_slices() -> None:
    """As the engine does, or always, or never."""
    engine, never, always = (Costs(MODELS["qwen3-8b"], gpus=8, slices=how) for how in (None, False, True))
    first = paper.slices_from(engine)
    assert first == 173  # of 8 KiB: 42 times these against 8 times 7.4 MB
    assert engine.step(43, 3, 0) == never.step(43, 3, 0) < always.step(43, 3, 0)
    assert engine.step(64, 3, 0) == always.step(64, 3, 0) < never.step(64, 3, 0)
    assert engine.prompts([(first - 1, 0)]) == never.prompts([(first - 1, 0)])
    assert engine.prompts([(first, 0)]) == always.prompts([(first, 0)])
    assert paper.slices_from(Costs(MODELS["qwen3-8b"], gpus=2)) is None


@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (2048, 0), (300, 5000)])
def test_a_prompt_costs_what_the_account_says(tokens: int, start: int) -> None:
    exact = prefill(EIGHT.config, tokens, start).estimate(Machine())
    assert EIGHT.prompts([(tokens, start)]) == pytest.approx(exact, rel=1e-9)
    assert EIGHT.prompt(tokens, start) == pytest.approx(exact, rel=1e-9)


def test_prompts_in_one_pass_share_the_weights() -> None:
    several = EIGHT.prompts([(10, 0), (20, 500)])
    assert EIGHT.prompts([(30, 0)]) < several < EIGHT.prompts([(10, 0)]) + EIGHT.prompts([(20, 500)])


def test_models_with_windows_are_refused() -> None:
    config = replace(MODELS["qwen3-8b"], windows=(512,) * 36)
    with pytest.raises(ValueError, match="sliding windows"):
        Costs(config)


# ---- guessing ----------------------------------------------------------------------------------


def test_what_drafts_bring_is_what_was_replayed() -> None:
    """Each of K is right with probability one half, and half of the steps have some."""
    traces = [synthetic(0.5, 0.5, 3000, seed) for seed in range(8)]
    found = brought(traces, 20_000)
    assert found[0] == 1
    assert found[4] == pytest.approx(1 + 0.5 * (1 / 2 + 1 / 4 + 1 / 8 + 1 / 16), rel=0.02)


def test_the_automatic_k_is_the_fastest_that_is_captured() -> None:
    for rows in (1, 64, 300):
        k = Guessing([HALF]).choose(EIGHT, [rows], rows * 1024)
        rates = {n: HALF[n] / EIGHT.step(rows, n, rows * 1024) for n in captured(rows)}
        assert rates[k] == max(rates.values())
    assert max(captured(300)) == 2  # 300 rows of 3 tokens are 900 of 1,024


def test_a_fixed_k_is_cut_to_what_is_captured() -> None:
    assert Guessing([HALF], 8).choose(EIGHT, [64], 0) == 8
    assert Guessing([HALF], 8).choose(EIGHT, [200], 0) == 4


def test_rows_of_both_kinds_decide() -> None:
    mixed = Guessing([PLAIN, HALF])
    assert mixed.choose(EIGHT, [128, 0], 128_000) == 0
    assert mixed.choose(EIGHT, [0, 128], 128_000) > 0


def test_a_k_that_was_not_replayed() -> None:
    with pytest.raises(ValueError, match="K=5 is not one of those that were replayed: 0, 1"):
        Guessing([HALF], 5)


# ---- the load ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_rate_is_what_is_asked_for(shape: str) -> None:
    load = Workload(50.0, 100.0, shape=shape)
    requests = load.requests()
    assert len(requests) == pytest.approx(5000, rel=0.05)
    assert [r.at for r in requests] == sorted(r.at for r in requests)
    assert [r.at for r in load.requests()] == [r.at for r in requests]
    assert [r.at for r in load.requests(1)] != [r.at for r in requests]


def test_a_day_and_bursts_have_their_peaks() -> None:
    day = [r.at for r in Workload(50.0, 100.0, shape="day").requests()]
    assert sum(40 <= at < 60 for at in day) / sum(at < 10 or at >= 90 for at in day) == pytest.approx(
        1.58 / 0.42, rel=0.15
    )
    bursts = [r.at for r in Workload(50.0, 100.0, shape="bursts").requests()]
    assert sum(at % 10 < 1 for at in bursts) / len(bursts) == pytest.approx(0.46, rel=0.1)


def test_prefixes_and_lengths() -> None:
    load = Workload(100.0, 50.0, prompt=1000, output=100, shared=600, sharing=0.5, prefixes=10, skew=1.0)
    requests = load.requests()
    with_one = [r for r in requests if r.prefix != NO_PREFIX]
    assert len(with_one) / len(requests) == pytest.approx(0.5, rel=0.1)
    first, second = (sum(r.prefix == n for r in with_one) for n in (0, 1))
    assert first / second == pytest.approx(2, rel=0.15)
    assert sum(r.prompt for r in requests) / len(requests) == pytest.approx(1000, rel=0.03)
    assert sum(r.output for r in requests) / len(requests) == pytest.approx(100, rel=0.05)
    assert all(r.prompt > r.shared for r in requests)
    assert {r.shared for r in requests} == {0, 600}


def test_loads_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="shape='week' is none of poisson, day, bursts"):
        Workload(1.0, 1.0, shape="week")
    with pytest.raises(ValueError, match="shared=1024 must be less than the prompt of 1024"):
        Workload(1.0, 1.0, prompt=1024, shared=1024)


# ---- the cache ---------------------------------------------------------------------------------


def request(prefix: int = NO_PREFIX, shared: int = 0, prompt: int = 100, output: int = 10) -> Request:
    return Request(0.0, prefix, shared, prompt, output, 0)


def test_a_prefix_is_kept_until_its_room_is_needed() -> None:
    cache = Cache(400)
    one, other, again = request(1, 80), request(2, 80), request(1, 80)
    assert cache.admit(one) == 0
    cache.release(one)
    assert cache.admit(other) == 0
    cache.release(other)
    assert cache.used == 160
    assert cache.admit(again) == 80
    assert cache.used == 190  # its own 30
    cache.release(again)
    assert cache.admit(request(prompt=281)) == 0  # 80 + 80 + 291: the one longest unused goes
    assert cache.used == 371
    assert cache.admit(request(2, 80)) is None
    assert cache.admit(request(1, 80, prompt=90)) == 80


def test_a_prefix_in_use_is_not_evicted() -> None:
    cache = Cache(200)
    assert cache.admit(request(1, 80)) == 0
    assert cache.admit(request()) is None
    assert cache.used == 110
    assert cache.admit(request(1, 80)) == 80


def test_a_prefix_does_not_make_room_for_its_own_request() -> None:
    cache, first = Cache(100), request(1, 80, prompt=85, output=5)
    assert cache.admit(first) == 0
    cache.release(first)
    assert cache.admit(request(1, 80)) is None
    assert cache.used == 80


def test_a_whole_prompt_is_never_cached() -> None:
    """The last token is computed for its logits."""
    cache = Cache(1000)
    cache.admit(request(1, 100))
    assert cache.admit(request(1, 100)) == 99


# ---- routing -----------------------------------------------------------------------------------


def test_the_least_loaded_take_turns() -> None:
    choose = least_loaded()
    assert [choose(request(), [1, 0, 0]) for _ in range(4)] == [1, 2, 1, 2]


def test_a_prefix_has_a_home_until_that_is_overloaded() -> None:
    choose, idle = by_prefix(1.25), [0] * 8
    home = choose(request(5, 50), idle)
    assert {choose(request(5, 50), idle) for _ in range(5)} == {home}
    assert len({choose(request(n, 50), idle) for n in range(50)}) > 4
    loads = [4] * 8
    loads[home] = 9
    assert choose(request(5, 50), loads) == (home + 1) % 8
    assert by_prefix(float("inf"))(request(5, 50), loads) == home


# ---- a fleet -----------------------------------------------------------------------------------

LOADS = st.builds(
    Workload,
    rate=st.sampled_from([2.0, 20.0]),
    seconds=st.just(2.0),
    prompt=st.sampled_from([60, 700]),
    output=st.sampled_from([1, 40]),
    shared=st.sampled_from([0, 50]),
    sharing=st.sampled_from([0.5, 1.0]),
    prefixes=st.integers(1, 6),
    copying=st.sampled_from([0.0, 0.5]),
    shape=st.sampled_from(SHAPES),
)


@settings(max_examples=40)
@given(
    load=LOADS,
    seed=st.integers(0, 99),
    router=st.sampled_from([*ROUTERS]),
    k=st.sampled_from([None, 0, 3]),
    prefillers=st.integers(0, 2),
    rows=st.sampled_from([1, 3, 50]),
    chunk=st.sampled_from([1, 100, 2048]),
)
def test_nothing_is_lost_or_made_up(
    load: Workload, seed: int, router: str, k: int | None, prefillers: int, rows: int, chunk: int
) -> None:
    guessing = Guessing([PLAIN, HALF], k)
    chunk = max(chunk, load.prompt // 20)  # or it takes forever
    most = 8 * (load.prompt + load.output) + load.shared
    own = [small(most, guessing, rows=rows, chunk=chunk) for _ in range(2)]
    first = [small(most, guessing, rows=rows, chunk=chunk, prefills=True) for _ in range(prefillers)]
    requests, fleet = load.requests(seed), Fleet(own, ROUTERS[router](), first)
    highest = watch(own + first)
    fleet.run(requests)
    for r in requests:
        assert 0 <= r.at <= r.start < r.first <= r.end, "every request ends, once, in order"
        assert r.left == 0
        assert 0 <= r.cached <= min(r.shared, r.prompt - 1)
        assert (r.first == r.end) == (r.output == 1)
    totals = [replica.totals for replica in own + first]
    assert sum(t.computed + t.cached for t in totals) == sum(r.prompt for r in requests)
    assert all(used <= most for used in highest)
    for replica in own + first:
        assert replica.cache.used == sum(replica.cache._idle.values())
        assert not replica.cache._users
        assert replica._context == pytest.approx(0, abs=1e-3)
        assert (replica.run, replica._running, len(replica.waiting)) == (None, 0, 0)
    if not prefillers:  # Little's law: rows x time = requests x the time each has one
        inside = sum(r.end - r.start for r in requests)
        assert sum(t.rows for t in totals) == pytest.approx(inside)
    assert [vars_of(r) for r in again(load, seed, router, own + first, prefillers)] == list(
        map(vars_of, requests)
    )


def watch(replicas: list[Replica]) -> list[int]:
    """The most K/V that each has had in use, kept up to date."""
    highest = [0] * len(replicas)

    def watched(i: int, cache: Cache) -> None:
        admit = cache.admit

        def and_look(request: Request) -> int | None:
            cached = admit(request)
            highest[i] = max(highest[i], cache.used)
            return cached

        cache.admit = and_look  # type: ignore[method-assign]

    for i, replica in enumerate(replicas):
        watched(i, replica.cache)
    return highest


def again(load: Workload, seed: int, router: str, like: list[Replica], prefillers: int) -> list[Request]:
    """The same run once more."""
    copies = [
        small(r.cache.capacity, r.guessing, rows=r.rows, chunk=r.chunk, prefills=r.prefills) for r in like
    ]
    first = copies[len(copies) - prefillers :]
    requests = load.requests(seed)
    Fleet(copies[: len(copies) - prefillers], ROUTERS[router](), first).run(requests)
    return requests


def vars_of(request: Request) -> tuple[object, ...]:
    return tuple(getattr(request, name) for name in request.__slots__)


def test_a_request_alone_takes_its_steps() -> None:
    """Two drafts of which half are right: 1.75 tokens a step, 57 steps for 99 tokens."""
    replica, one = Replica(EIGHT, Guessing([HALF], 2)), request(prompt=3000, output=100)
    Fleet([replica], least_loaded()).run([one])
    assert 1e3 * one.ttft == pytest.approx(EIGHT.prompt(3000))
    low, high = (57 * EIGHT.step(1, 2, at) / 1e3 for at in (3000, 3100))
    assert low < one.end - one.first < high


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_waiting_at_one_server_is_that_of_m_d_1(load: float) -> None:
    """Prompts of one length, one at a time, one token out: a wait of load / (2 (1 - load)) services."""
    service = EIGHT.prompt(1000) / 1e3
    arrivals = Workload(load / service, 20_000 * service / load, 1000, 1, spread=0.0)
    requests = arrivals.requests()
    Fleet([Replica(EIGHT, NEVER, rows=1)], least_loaded()).run(requests)
    waited = sum(r.ttft - service for r in requests) / len(requests)
    assert waited == pytest.approx(service * load / (2 * (1 - load)), rel=0.08)


def test_a_full_replica_reaches_the_roofline() -> None:
    for row in questions.saturated(PLAIN)[:2]:
        assert row["simulated"] == pytest.approx(row["roofline"], rel=0.02)


def test_drafts_that_are_right_are_tokens_saved() -> None:
    """Decoding by memory alone, two tokens a step for one."""
    both = {0: 1.0, 1: 2.0}
    plain, fast = (Setup(EIGHT, Guessing([dict.fromkeys(KS, 1.0) | both], k), rows=4) for k in (0, 1))
    load = Workload(0.05, 200.0, prompt=10, output=400, spread=0.0)
    tpot = [figures(setup, load, Bounds())["tpot_ms"]["median"] for setup in (plain, fast)]
    assert tpot[0] / tpot[1] == pytest.approx(2, rel=0.02)


def test_who_comes_waits_for_the_step_under_way_only() -> None:
    requests = [request(output=500), request()]
    requests[1].at = 0.5
    Fleet([Replica(EIGHT, NEVER)], least_loaded()).run(requests)
    assert requests[1].at < requests[1].start < requests[1].at + EIGHT.step(1, 0, 1000) / 1e3


def test_a_replica_that_is_done_is_the_least_loaded() -> None:
    """One has a long answer to write, so the other gets all short ones, which come one after the other."""
    requests = [request(output=2000), *(request(prompt=50) for _ in range(5))]
    for i, short in enumerate(requests[1:], 1):
        short.at = 0.2 * i
    busy, free = Replica(EIGHT, NEVER), Replica(EIGHT, NEVER)
    Fleet([busy, free], least_loaded()).run(requests)
    assert (busy.totals.computed, free.totals.computed) == (100, 250)


def test_prompts_are_sent_one_after_the_other() -> None:
    """The second is computed while the first is sent, which takes longer."""
    requests = [request(prompt=500, output=2) for _ in range(2)]
    Fleet([small(10_000)], least_loaded(), [small(10_000, prefills=True)], 1e9).run(requests)
    assert requests[1].first < requests[0].end
    assert requests[1].end - requests[0].end == pytest.approx(500 * 147_456 / 1e9, rel=0.1)


def test_sending_takes_its_time() -> None:
    """One prompt of 4,096 tokens of 147,456 bytes, at a GB/s."""
    ends = []
    for bandwidth in (1e9, 1e15):
        one = request(prompt=4096, output=2)
        apart = [small(10_000, prefills=True)]
        Fleet([small(10_000)], least_loaded(), apart, bandwidth).run([one])
        ends.append(one.end - one.first)
    assert ends[0] - ends[1] == pytest.approx(4096 * 147_456 / 1e9, rel=1e-3)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="90 and 20 tokens is beyond a replica's cache of 100"):
        Fleet([small(100)], least_loaded()).run([request(prompt=90, output=20)])


@pytest.mark.parametrize(("rate", "grows"), [(15.0, False), (45.0, True)], ids=["half", "too-much"])
def test_a_queue_that_grows_is_seen(rate: float, grows: bool) -> None:
    """Prompts alone allow for some 50 requests a second; nobody is late by these bounds."""
    found = figures(Setup(EIGHT, NEVER), Workload(rate, 20.0), Bounds(100.0, 100.0))
    assert (found["served_well"], found["waits_grow"]) == (1.0, grows)


def test_the_rate_that_is_found_is_the_highest() -> None:
    setup, load, bounds = Setup(EIGHT, NEVER, 2), Workload(1.0, 10.0), Bounds(1.0, 0.012)
    rate, there = capacity(setup, load, bounds, 0.5, 1.0)  # it lies far above
    assert there["served_well"] >= 0.95
    assert figures(setup, replace(load, rate=2 * 1.06 * rate), bounds)["served_well"] < 0.95
    assert capacity(setup, load, bounds, 4 * rate, 5 * rate)[0] == pytest.approx(rate, rel=0.05)


# ---- paper -------------------------------------------------------------------------------------


def test_the_best_replica_is_within_its_bound() -> None:
    splits = [Costs(MODELS["llama-3.3-70b"], gpus=gpus) for gpus in (1, 2, 8)]
    point = paper.best(splits, HALF, 20)
    assert point
    assert point.ms <= 20
    assert point.gpus > 1, "it does not fit on one"
    assert point.rows * (1024 + 256) <= splits[1 if point.gpus == 2 else 2].kv_tokens
    assert point.rate == pytest.approx(1e3 * point.rows / point.ms / point.gpus)
    assert paper.best(splits, HALF, 1) is None
    assert paper.dollars(1000, price=3.6) == pytest.approx(1.0)


def test_what_is_cached_is_not_computed() -> None:
    point, rest = (paper.steady(EIGHT, PLAIN, 32, 0, 1024, 256, cached) for cached in (0, 896))
    saved = EIGHT.prompt(1024) - EIGHT.prompt(128, 896)
    assert point.ms - rest.ms == pytest.approx(32 * saved / 256)
    whole, cached = (paper.replicas({}, cached=n)["qwen3-8b"]["20"]["none"] for n in (0, 896))
    assert cached["rate"] > 1.5 * whole["rate"]


def test_a_draft_model_is_split_from_its_crossover_on() -> None:
    """Bytes of half the weights against two exchanges a layer, about: 16 layers on 2 GPUs."""
    found = paper.draft_models(exchanges=(10e-6,))["crossovers"]
    size = next(r["parameters"] for r in found if (r["gpus"], r["layers"], r["rows"]) == (2, 16, 1))
    assert size == pytest.approx(33 * 10e-6 * 4.3e12 / (2 * (1 - 1 / 2)), rel=0.35)
    sizes = {r["gpus"]: r["parameters"] for r in found if (r["layers"], r["rows"]) == (28, 1)}
    assert sizes[2] > sizes[4] > sizes[8]
    assert paper._crossover(2, 20, 1, Machine()) == pytest.approx(4e9 / 2, rel=0.05), "tensor-parallel.md"
    assert paper._crossover(2, 8, 1, Machine(exchange=1.0)) is None
    least = paper.draft_shape(paper.WIDTHS[0], 8).num_parameters
    assert paper._crossover(2, 8, 1, Machine(bandwidth=1e9)) == pytest.approx(least, rel=0.01)


# ---- the command -------------------------------------------------------------------------------


def test_the_command_answers_every_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: [synthetic(0.5, 0.5, 300, seed) for seed in range(4)] for name in command.KINDS}
    monkeypatch.setattr(command, "replay", lambda tokenizer, count: texts)
    monkeypatch.setattr(paper, "replicas", lambda *given, **more: {})
    for name in ("cost", "routing", "disaggregation", "day", "bursts", "saturated", "auto_policy"):
        monkeypatch.setattr(questions, name, lambda *given: {})
    command.main(["--quick", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "fleet.json").read_text())
    committed = json.loads((command.common.RESULTS / "fleet.json").read_text())
    assert result.keys() == committed.keys()
    assert result["draft_models"] == committed["draft_models"], "the account has changed: bench/fleet.py"
    assert result["sums"] == committed["sums"], "the account has changed: python bench/fleet.py"
