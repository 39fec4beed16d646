"""The scheduler inside an engine without a model: the "K/V" of a position is a hash of all tokens up to it,
rejected drafts leave junk, and every read of a position is checked. The host may lag a step behind, as on
a GPU: the results of a step become known only after the next one is planned."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanospec.config import SamplingParams
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan, Scheduler
from nanospec.kernels import FROM_TARGET, LENGTH, NO_DRAFTER, RUNNING, STOPPED
from nanospec.kernels.speculation.report import RowReport

SIZE = 4  # tokens per block


def contents(request: Request, tokens: list[int] | None = None) -> list[int]:
    """Return the expected cache content at each position of the request, or of `tokens` with its salt."""
    chain, value = [], hash(request.salt)
    for token in request.tokens if tokens is None else tokens:
        value = hash((value, token))
        chain.append(value)
    return chain


class Simulation:
    """An engine without a model."""

    def __init__(
        self,
        window: int,
        extra_blocks: int,
        num_rows: int,
        max_tokens: int,
        k: int,
        lag: int = 0,
        seed: int = 0,
    ) -> None:
        self.window, self.k, self.max_tokens, self.lag = window, k, max_tokens, lag
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(-(-window // SIZE) + extra_blocks, SIZE, num_rows, max_tokens, k, lag)
        self.pool = self.scheduler.pool
        self.num_rows = num_rows
        self.requests: list[Request] = []  # in order of arrival
        self.cache: dict[tuple[int, int], int] = {}  # (block, offset) -> K/V
        self.names: dict[bytes, list[int]] = {}  # hash of a full block -> its expected content
        self.on_device: dict[Request, list[int]] = {}  # tokens, including those in flight
        self.ended: set[Request] = set()  # on the device
        self.in_flight: list[list[tuple[Request, RowReport]]] = []

    def add(self, prompt: list[int], max_new: int, salt: bytes = b"") -> Request:
        request = Request(
            id=str(len(self.requests)),
            prompt_ids=prompt,
            params=SamplingParams(),
            seed=0,
            max_len=min(len(prompt) + max_new, self.window),
            salt=salt,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> Plan:
        arrived = {request: i for i, request in enumerate(self.requests)}
        plan = self.scheduler.schedule()
        self.check_plan(plan, arrived)
        for request in plan.admitted:
            self.on_device[request] = list(request.tokens)
            self.ended.discard(request)
        for request, start, count in plan.prefill:
            for position in range(start, start + count):
                self.write(request, position, contents(request)[position])
        for request, start, count in plan.prefill:
            self.check_seen(request, start + count)
        if plan.decode:
            self.in_flight.append([(request, self.decode(request)) for request in plan.decode])
        while len(self.in_flight) > (self.lag if plan.decode else 0):
            self.collect(self.in_flight.pop(0))
        self.check_names()
        return plan

    def write(self, request: Request, position: int, value: int) -> None:
        self.cache[request.blocks[position // SIZE], position % SIZE] = value

    def decode(self, request: Request) -> RowReport:
        """Draft up to k tokens, accept some, and commit these and one more."""
        if request in self.ended:  # not yet known to the host
            return RowReport([], 0, 0, NO_DRAFTER, 0, RUNNING, [])
        tokens = self.on_device[request]
        room = request.max_len - len(tokens)
        drafts = self.rng.randint(0, min(self.k, room - 1))
        accepted = self.rng.randint(0, drafts)
        first = len(tokens) - 1
        for position in range(first, first + drafts + 1):
            assert self.pool._references[request.blocks[position // SIZE]] == 1, "a shared slot"
            self.write(request, position, -self.rng.randrange(1 << 60))  # junk until accepted
        tokens += (new := [self.rng.randrange(2) for _ in range(accepted + 1)])
        for position in range(first, first + accepted + 1):
            self.write(request, position, contents(request, tokens)[position])
        self.check_seen(request, len(tokens) - 1)
        finished = LENGTH if len(new) == room else STOPPED if self.rng.random() < 0.03 else RUNNING
        if finished != RUNNING:
            self.ended.add(request)
        return RowReport(new, drafts, accepted, 0, 0, finished, [FROM_TARGET] * len(new))

    def collect(self, flight: list[tuple[Request, RowReport]]) -> None:
        """Process the results of a step; occasionally cut its tokens as at a stop string."""
        for request, step in flight:
            if request.is_finished:
                continue
            if step.tokens and self.rng.random() < 0.03:
                step = step._replace(tokens=step.tokens[: self.rng.randint(1, 9)], finished=STOPPED)
            request.append(step)
            if request.row >= 0:
                self.scheduler.register(request)
            self.remember_names(request)
            if request.finish_reason is not None:
                self.scheduler.finish(request)

    def abort(self, request: Request) -> None:
        request.finish("abort")
        self.scheduler.finish(request)

    def finish(self) -> None:
        """Run until all requests have finished, within a bounded number of steps."""
        for _ in range(100 + 60 * len(self.requests) * self.window):
            if not (self.scheduler.waiting or self.scheduler.running or self.in_flight):
                break
            self.step()
        assert all(request.is_finished for request in self.requests)
        assert len(self.pool.free) == self.pool.num_blocks
        assert sorted(self.scheduler._free_rows) == list(range(self.num_rows))

    def check_plan(self, plan: Plan, arrived: dict[Request, int]) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        prefilled = sum(count for _, _, count in plan.prefill)
        budget = self.max_tokens
        if plan.decode:  # prompts get at least one block, so they never starve
            budget = max(budget - len(plan.decode) * (1 + self.k), SIZE)
        assert prefilled <= budget
        assert all(count > 0 for _, _, count in plan.prefill)
        assert len({request for request, _, _ in plan.prefill}) == len(plan.prefill)
        planned = {*plan.decode, *(request for request, _, _ in plan.prefill), *plan.admitted}
        assert planned <= set(running)
        if any(not request.is_prefilled for request in running):
            assert plan.prefill, "a prompt waits without a reason"
        assert running or not waiting, "requests wait but none runs"
        assert not (plan.preempted and plan.admitted), "a step both preempts and admits"
        for request in plan.admitted:
            for other in waiting:  # a request may be passed if it waits for a shared prefix
                start = other.salt, other.tokens[:SIZE]
                shared = [r for r in running if (r.salt, r.tokens[:SIZE]) == start]
                assert arrived[request] < arrived[other] or shared, "not in order"
        for request in set(running) - planned:
            assert not request.is_prefilled, "a request that could decode does not"
        for request in plan.decode:
            slots = len(request.blocks) * SIZE
            ahead = self.k + self.lag * (self.k + 1)
            assert slots >= min(request.num_tokens + ahead, request.max_len)

    def check_seen(self, request: Request, count: int) -> None:
        expected = contents(request, self.on_device.get(request))
        for position in range(count):
            block = request.blocks[position // SIZE]
            assert self.cache[block, position % SIZE] == expected[position], (request.id, position)

    def remember_names(self, request: Request) -> None:
        chain = contents(request)
        for i, name in enumerate(request.hashes(SIZE)):
            self.names[name] = chain[i * SIZE : (i + 1) * SIZE]

    def check_names(self) -> None:
        """Check that every cached block holds the committed tokens of its hash."""
        for request in self.scheduler.running:
            self.remember_names(request)
        for block, name in self.pool._hash_of.items():
            assert name in self.names, "the hash of tokens that were never committed"
            assert [self.cache[block, i] for i in range(SIZE)] == self.names[name]

    def check_holders(self) -> None:
        running = self.scheduler.running
        holders = Counter(block for request in running for block in request.blocks)
        for block in range(self.pool.num_blocks):
            assert self.pool._references[block] == holders[block]
            assert (block in self.pool.free) == (holders[block] == 0)
        assert all(len(set(request.blocks)) == len(request.blocks) for request in running)
        rows = [request.row for request in running] + self.scheduler._free_rows
        assert sorted(rows) == list(range(self.num_rows))
        for request in self.requests:
            if request not in running:
                assert (request.row, request.blocks) == (-1, [])


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order, under tight limits of every kind."""

    @initialize(
        window=st.integers(2, 24),
        extra_blocks=st.integers(0, 4),
        num_rows=st.integers(1, 4),
        max_tokens=st.sampled_from((1, 2, 5, 16, 100)),
        k=st.sampled_from((0, 1, 3, 9)),
        lag=st.integers(0, 1),
        seed=st.integers(0, 1000),
    )
    def start(self, **limits: int) -> None:
        self.simulation = Simulation(**limits)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=23),
        max_new=st.integers(1, 30),
        salt=st.sampled_from((b"", b"", b"other")),
        copies=st.integers(1, 2),
    )
    def add(self, prompt: list[int], max_new: int, salt: bytes, copies: int) -> None:
        for _ in range(copies):
            self.simulation.add(prompt[: self.simulation.window - 1], max_new, salt)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.simulation.requests))
        if not request.is_finished:
            self.simulation.abort(request)

    @invariant()
    def only_running_requests_hold_blocks_and_rows(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check_holders()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()
            self.simulation.check_holders()


def test_scheduler_invariants() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=200, stateful_step_count=25))


def test_request_that_passed_another_resumes_after_it() -> None:
    """The second request waits for the first one's blocks, so the third passes it and is preempted later."""
    simulation = Simulation(window=17, extra_blocks=1, num_rows=2, max_tokens=5, k=0)
    for prompt, max_new, salt in ([0] * 13, 4, b""), ([0] * 13, 4, b""), ([0] * 7, 3, b"other"):
        simulation.add(prompt, max_new, salt)
    while not (plan := simulation.step()).preempted:
        assert {"1", "2"} & {request.id for request in simulation.scheduler.running} == {"2"}
    assert len(plan.preempted) == 1
    assert [request.id for request in simulation.scheduler.waiting] == ["1", "2"]
    simulation.finish()


def test_preempted_requests_resume_in_order_of_arrival() -> None:
    simulation = Simulation(window=24, extra_blocks=1, num_rows=4, max_tokens=100, k=3)
    requests = [simulation.add([i % 2] * 8, 16) for i in range(4)]
    preempted, first = 0, list[float | None]()
    while simulation.scheduler.waiting or simulation.scheduler.running:
        preempted += len(simulation.step().preempted)
        starts = [request.start_time for request in requests]
        first = first or starts
        assert all(request.row < 0 or request.start_time is not None for request in requests)
        assert all(before in (None, now) for before, now in zip(first, starts, strict=True))
        first = starts
        waiting = [requests.index(request) for request in simulation.scheduler.waiting]
        assert waiting == sorted(waiting)
    assert preempted == sum(request.num_preemptions for request in requests) > 0


def test_step_without_requests_plans_nothing() -> None:
    assert Simulation(8, 0, 1, 4, 2).step() == Plan()


def test_copies_of_a_prompt_share_full_blocks_in_one_step() -> None:
    simulation = Simulation(window=24, extra_blocks=20, num_rows=4, max_tokens=100, k=0)
    requests = [simulation.add([0, 1, 1, 0, 1, 0, 0, 1, 1, 1], 4) for _ in range(3)]
    plan = simulation.step()
    assert plan.prefill == [(requests[0], 0, 9), (requests[1], 8, 1), (requests[2], 8, 1)]
    assert list(plan.admitted.values()) == [0, 2, 2]  # blocks found in the cache
    assert simulation.pool.num_blocks - len(simulation.pool.free) == 2 + 3


def test_cached_prompt_is_not_prefilled() -> None:
    """A hit never covers the last token, since its logits are needed."""
    simulation = Simulation(window=24, extra_blocks=4, num_rows=2, max_tokens=100, k=2)
    for length, cached in ((9, 8), (8, 4)):
        prompt = [0, 1, 1, 0, 1, 0, 0, 1, 1][:length]
        simulation.add(prompt, 1)
        simulation.finish()
        again = simulation.add(prompt, 1)
        plan = simulation.step()
        assert again.num_cached_tokens == cached
        assert sum(count for _, _, count in plan.prefill) == length - 1 - cached
        simulation.finish()


def test_abort_at_any_step_frees_everything() -> None:
    for steps in range(6):
        simulation = Simulation(window=24, extra_blocks=2, num_rows=3, max_tokens=5, k=2)
        requests = [simulation.add([0, 1] * n, 8) for n in (2, 5, 8, 3)]
        for _ in range(steps):
            simulation.step()
        for request in requests:
            if not request.is_finished:
                simulation.abort(request)
        assert simulation.step() == Plan()
        simulation.finish()


def chunks(plan: Plan) -> list[int]:
    return [count for _, _, count in plan.prefill]


def test_short_prompt_shares_steps_with_long_one() -> None:
    """Prompts share a step's budget; one alone, or with prompts that finish in the step, gets the rest."""
    simulation = Simulation(window=256, extra_blocks=100, num_rows=4, max_tokens=32, k=0)
    long = simulation.add(list(range(201)), 4)
    assert chunks(simulation.step()) == [32]
    simulation.add([7] * 11, 4)
    assert chunks(simulation.step()) == [16, 10]
    assert chunks(simulation.step()) == [31]  # the short one decodes
    simulation.add([9] * 151, 4)
    for _ in range(2):  # while one waits, then when both run
        assert chunks(simulation.step())[:2] == [15, 16]
    assert not long.is_prefilled


def test_forget_unwritten_unregisters_failed_chunk_only() -> None:
    simulation = Simulation(window=64, extra_blocks=50, num_rows=2, max_tokens=8, k=0)
    other, request = simulation.add([7] * 2, 9), simulation.add(list(range(21)), 2)
    simulation.step()
    plan = simulation.scheduler.schedule()
    assert (plan.prefill, plan.decode) == ([(request, 7, 7)], [other])
    assert simulation.scheduler.forget_unwritten(plan) == [request]
    assert simulation.pool.match(request.hashes(SIZE)) == request.blocks[:1]


def test_no_budget_is_reserved_for_inadmissible_prompt() -> None:
    simulation = Simulation(window=64, extra_blocks=0, num_rows=4, max_tokens=32, k=0)
    simulation.add(list(range(61)), 2)
    simulation.add([7] * 21, 2)  # does not fit into the pool
    assert chunks(simulation.step()) == [32]


def test_samples_of_one_prompt_prefill_once_and_can_be_passed() -> None:
    simulation = Simulation(window=256, extra_blocks=300, num_rows=6, max_tokens=32, k=0)
    for _ in range(3):
        simulation.add(list(range(161)), 2)
    short = simulation.add([7] * 9, 2)
    computed = sum(map(sum, (chunks(simulation.step()) for _ in range(2))))
    assert short.is_prefilled
    while simulation.scheduler.waiting:
        computed += sum(chunks(simulation.step()))
    assert computed <= 161 + 8 + 3 * SIZE


def test_request_does_not_wait_for_block_of_its_last_token() -> None:
    """The last token is always recomputed, since its logits are needed."""
    simulation = Simulation(window=64, extra_blocks=50, num_rows=2, max_tokens=8, k=0)
    simulation.add(list(range(21)), 2)
    assert chunks(simulation.step()) == [8]
    short = simulation.add(list(range(12)), 2)
    plan = simulation.step()
    assert list(plan.admitted.items()) == [(short, 2)]
    assert chunks(plan) == [4, 3]


def test_request_does_not_wait_for_block_being_decoded() -> None:
    """A prompt waits only for prompts."""
    simulation = Simulation(window=64, extra_blocks=50, num_rows=2, max_tokens=32, k=0)
    simulation.add(list(range(8)), 20)
    simulation.step()
    longer = simulation.add(list(range(10)), 2)
    assert list(simulation.step().admitted.items()) == [(longer, 1)]
