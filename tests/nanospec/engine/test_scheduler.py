"""The scheduler and its block pool, without a model. `campaigns/simulate` checks the contents of blocks."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.simulate.invariants import check_blocks, check_queues
from nanospec.config import SamplingParams
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan, Scheduler
from nanospec.kernels import FROM_TARGET, LENGTH, NO_DRAFTER, RUNNING, STOPPED
from nanospec.kernels.speculation.report import RowReport

SIZE = 4  # tokens per block


class Host:
    """A host loop that checks every plan. Each step adds up to k + 1 random tokens per request; the host may
    lag a step behind, as on a GPU: it gets the results of a step only after it has planned the next one."""

    def __init__(
        self, window: int, extra_blocks: int, num_rows: int, max_tokens: int, k: int, lag: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.window, self.num_rows, self.max_tokens, self.k, self.lag = window, num_rows, max_tokens, k, lag
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(-(-window // SIZE) + extra_blocks, SIZE, num_rows, max_tokens, k, lag)
        self.pool = self.scheduler.pool
        self.requests: list[Request] = []  # in order of arrival
        self.length: dict[Request, int] = {}  # on the device, including tokens in flight
        self.starts: dict[Request, float | None] = {}
        self.ended: set[Request] = set()  # on the device
        self.in_flight: list[list[tuple[Request, RowReport]]] = []

    def add(self, prompt: list[int], max_new: int, salt: bytes = b"") -> Request:
        length = min(len(prompt) + max_new, self.window)
        name = str(len(self.requests))
        request = Request(name, prompt, SamplingParams(), seed=0, max_len=length, salt=salt)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        self.check_holders()
        for request in plan.admitted:
            assert request.start_time == self.starts.setdefault(request, request.start_time), "started twice"
            self.length[request] = request.num_tokens
            self.ended.discard(request)
        if plan.decode:
            self.in_flight.append([(request, self.decode(request)) for request in plan.decode])
        while len(self.in_flight) > (self.lag if plan.decode else 0):
            self.collect(self.in_flight.pop(0))
        return plan

    def decode(self, request: Request) -> RowReport:
        """Draft up to k tokens, accept some, and add one more."""
        if request in self.ended:  # not yet known to the host
            return RowReport([], 0, 0, NO_DRAFTER, 0, RUNNING, [])
        first, room = self.length[request] - 1, request.max_len - self.length[request]
        drafts = self.rng.randint(0, min(self.k, room - 1))
        for position in range(first, first + drafts + 1):
            assert self.pool._references[request.blocks[position // SIZE]] == 1, "a shared slot is written"
        accepted = self.rng.randint(0, drafts)
        tokens = self.rng.choices((0, 1), k=accepted + 1)
        self.length[request] += len(tokens)
        finished = LENGTH if len(tokens) == room else STOPPED if self.rng.random() < 0.03 else RUNNING
        if finished != RUNNING:
            self.ended.add(request)
        return RowReport(tokens, drafts, accepted, 0, 0, finished, [FROM_TARGET] * len(tokens))

    def collect(self, flight: list[tuple[Request, RowReport]]) -> None:
        """Process the results of a step; occasionally cut its tokens as at a stop string."""
        for request, report in flight:
            if request.is_finished:
                continue
            if report.tokens and self.rng.random() < 0.03:
                report = report._replace(tokens=report.tokens[: self.rng.randint(1, 9)], finished=STOPPED)
            request.append(report)
            if request.row >= 0:
                self.scheduler.register(request)
            if request.finish_reason is not None:
                self.scheduler.finish(request)

    def abort(self, request: Request) -> None:
        if not request.is_finished:
            request.finish("abort")
            self.scheduler.finish(request)

    def finish(self) -> None:
        """Run until all requests have finished, within a bounded number of steps."""
        for _ in range(100 + 60 * len(self.requests) * self.window):
            if not (self.scheduler.waiting or self.scheduler.running or self.in_flight):
                break
            self.step()
        assert all(request.is_finished for request in self.requests)
        self.check_holders()

    def check_plan(self, plan: Plan) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        budget = self.max_tokens
        if plan.decode:  # each step prefills at least one block, so prompts always progress
            budget = max(budget - len(plan.decode) * (1 + self.k), SIZE)
        assert sum(chunks(plan)) <= budget
        assert all(count > 0 for count in chunks(plan))
        assert len({request for request, _, _ in plan.prefill}) == len(plan.prefill)
        planned = {*plan.decode, *(request for request, _, _ in plan.prefill), *plan.admitted}
        assert planned <= set(running)
        assert plan.prefill or all(r.is_prefilled for r in running), "a prompt waits without a reason"
        assert running or not waiting, "requests wait but none runs"
        assert not (plan.preempted and plan.admitted), "a step both preempts and admits"
        for request in plan.admitted:
            for other in waiting:  # a request may be passed if it waits for a shared prefix
                start = other.salt, other.tokens[:SIZE]
                shared = [r for r in running if (r.salt, r.tokens[:SIZE]) == start]
                in_order = self.requests.index(request) < self.requests.index(other)
                assert in_order or shared, "a request was admitted out of order"
        for request in set(running) - planned:
            assert not request.is_prefilled, "a request that could decode does not"
        for request in plan.decode:
            ahead = self.k + self.lag * (self.k + 1)
            assert len(request.blocks) * SIZE >= min(request.num_tokens + ahead, request.max_len)

    def check_holders(self) -> None:
        """Check that running requests alone hold rows and blocks."""
        config = SimpleNamespace(max_num_seqs=self.num_rows)
        engine: Any = SimpleNamespace(scheduler=self.scheduler, config=config)
        check_queues(engine)
        check_blocks(engine)
        for request in set(self.requests) - set(self.scheduler.running):
            assert (request.row, request.blocks) == (-1, [])


def chunks(plan: Plan) -> list[int]:
    return [count for _, _, count in plan.prefill]


@settings(max_examples=150)
@given(
    window=st.integers(2, 24), extra_blocks=st.integers(0, 4), num_rows=st.integers(1, 4),
    max_tokens=st.sampled_from((1, 2, 5, 16, 100)), k=st.sampled_from((0, 1, 3, 9)), lag=st.integers(0, 1),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_every_plan_is_valid_for_random_requests(**limits: int) -> None:
    """Requests arrive and are aborted at any time, under tight limits of every kind."""
    host = Host(**limits)
    rng = host.rng
    for _ in range(40):
        event = rng.random() if host.requests else 0.0
        if event < 0.3:
            prompt = rng.choices((0, 1), k=rng.randint(1, host.window - 1))
            salt = rng.choice((b"", b"", b"x"))
            for _ in range(rng.randint(1, 2)):
                host.add(prompt, rng.randint(1, 30), salt)
        elif event < 0.9:
            host.step()
        else:
            host.abort(rng.choice(host.requests))
            host.check_holders()
    host.finish()


def test_request_that_passed_another_resumes_after_it() -> None:
    """The second request waits for the first one's blocks, so the third passes it and is preempted later."""
    host = Host(window=17, extra_blocks=1, num_rows=2, max_tokens=5, k=0)
    for prompt, max_new, salt in ([0] * 13, 4, b""), ([0] * 13, 4, b""), ([0] * 7, 3, b"other"):
        host.add(prompt, max_new, salt)
    while not (plan := host.step()).preempted:
        assert {"1", "2"} & {request.id for request in host.scheduler.running} == {"2"}
    assert len(plan.preempted) == 1
    assert [request.id for request in host.scheduler.waiting] == ["1", "2"]
    host.finish()


def test_short_prompt_shares_steps_with_long_one() -> None:
    """Prompts share a step's budget. If the others finish in the step, a prompt gets the rest."""
    host = Host(window=256, extra_blocks=100, num_rows=4, max_tokens=32, k=0)
    long = host.add(list(range(201)), 4)
    assert chunks(host.step()) == [32]
    host.add([7] * 11, 4)
    assert chunks(host.step()) == [16, 10]
    assert chunks(host.step()) == [31]  # the short one decodes
    host.add([9] * 151, 4)
    for _ in range(2):  # while one waits, then when both run
        assert chunks(host.step())[:2] == [15, 16]
    assert not long.is_prefilled


def test_forget_unwritten_unregisters_failed_chunk_only() -> None:
    host = Host(window=64, extra_blocks=50, num_rows=2, max_tokens=8, k=0)
    other, request = host.add([7] * 2, 9), host.add(list(range(21)), 2)
    host.step()
    plan = host.scheduler.schedule()
    assert (plan.prefill, plan.decode) == ([(request, 7, 7)], [other])
    assert host.scheduler.forget_unwritten(plan) == [request]
    assert host.pool.match(request.hashes(SIZE)) == request.blocks[:1]


def test_no_budget_is_reserved_for_inadmissible_prompt() -> None:
    host = Host(window=64, extra_blocks=0, num_rows=4, max_tokens=32, k=0)
    host.add(list(range(61)), 2)
    host.add([7] * 21, 2)  # does not fit into the pool
    assert chunks(host.step()) == [32]


def test_samples_of_one_prompt_prefill_once_and_can_be_passed() -> None:
    host = Host(window=256, extra_blocks=300, num_rows=6, max_tokens=32, k=0)
    for _ in range(3):
        host.add(list(range(161)), 2)
    short = host.add([7] * 9, 2)
    computed = sum(chunks(host.step())) + sum(chunks(host.step()))
    assert short.is_prefilled
    while host.scheduler.waiting:
        computed += sum(chunks(host.step()))
    assert computed <= 161 + 8 + 3 * SIZE


def test_request_does_not_wait_for_block_of_its_last_token() -> None:
    """The last token is always recomputed, since its logits are needed."""
    host = Host(window=64, extra_blocks=50, num_rows=2, max_tokens=8, k=0)
    host.add(list(range(21)), 2)
    assert chunks(host.step()) == [8]
    short = host.add(list(range(12)), 2)
    plan = host.step()
    assert list(plan.admitted.items()) == [(short, 2)]
    assert chunks(plan) == [4, 3]


def test_request_does_not_wait_for_block_being_decoded() -> None:
    """A prompt waits only for blocks of other prompts."""
    host = Host(window=64, extra_blocks=50, num_rows=2, max_tokens=32, k=0)
    host.add(list(range(8)), 20)
    host.step()
    longer = host.add(list(range(10)), 2)
    assert list(host.step().admitted.items()) == [(longer, 1)]


@pytest.mark.parametrize("lag", [0, 1])
def test_each_turn_of_conversation_finds_all_computed_blocks(lag: int) -> None:
    """Also after stop strings and with prompts of several chunks. A block is full when its last token's K/V
    are computed, which the last token's of an output and of a prompt are not."""
    host = Host(window=1024, extra_blocks=9, num_rows=3, max_tokens=16, k=3, lag=lag)
    tokens, found = [5] * 41, 0
    for turn in range(20):
        request = host.add(tokens, 20)
        while turn % 5 == 4 and len(request.output_ids) < 8 and not request.is_finished:
            host.step()
        if turn % 5 == 4:
            host.abort(request)
        host.finish()
        assert request.num_cached_tokens == found // SIZE * SIZE
        found = request.num_tokens - 1
        tokens = request.tokens + host.rng.choices((0, 1), k=17)


def test_conversations_outlast_long_prompts() -> None:
    """10 conversations, each with a pause between its turns, run beside long prompts that come once."""
    host = Host(1024, extra_blocks=1744, num_rows=2, max_tokens=128, k=0)
    system, rates, running = list(range(64)), list[float](), list[tuple[Request, int]]()
    due = {i: [([*system, i], 0)] for i in range(10)}  # by step: prompts, full blocks of the previous turn
    for step in range(1500):
        running += [(host.add(prompt, 8), count) for prompt, count in due.pop(step, ())]
        if step % 16 == 0:
            host.add(host.rng.choices(range(99), k=1000), 8)
        host.step()
        for request, count in [each for each in running if each[0].is_finished]:
            running.remove((request, count))
            rates += [request.num_cached_tokens // SIZE / count] if count else []
            prompt = request.tokens + host.rng.choices(range(99), k=24)
            if len(prompt) < 700:
                due.setdefault(step + 51, []).append((prompt, request.num_tokens // SIZE))
    assert len(rates) > 180
    assert sum(rates) / len(rates) > 0.95, sum(rates) / len(rates)
