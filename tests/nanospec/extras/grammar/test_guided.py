"""Structured outputs follow their grammar and do not depend on speculation."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanospec.device.graphs as graphs
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.drafters import Drafter, draft_limits, make_proposal
from nanospec.drafters.policy import ByRow, Policy
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.extras.grammar.extension import Grammar
from nanospec.kernels import NO_DRAFTER, launch
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.text.tokenizer import Tokenizer
from tests.drive import MODES, Job, assert_same, finish, make_engine, outcome, run, run_alone
from tests.nanospec.extras.grammar.guided import CHOICES, FORMATS, VOCAB, guided_jobs, is_right
from tests.nanospec.extras.tracing.records import record_of
from tests.tape import TapeCapture
from tests.tiny import tiny_model, tiny_tokenizer

JSON, REGEX, _, CHOICE, _ = (fmt for fmt, _ in FORMATS)
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model() -> Model:
    """Random weights, so unguided output never follows a grammar."""
    return tiny_model(vocab_size=VOCAB)


@pytest.fixture
def make(model: Model, tokenizer: Tokenizer) -> Make:
    def engine(k: Any = 4, **options: Any) -> Engine:
        return make_engine(model, k, tokenizer=tokenizer, **options)

    return engine


def assert_formats_followed(requests: list[Request]) -> int:
    """Check that all complete outputs follow their format, and return how many there are."""
    count = 0
    for request in requests:
        fmt = request.params.response_format
        by_grammar = request.finish_reason == "stop" and request.stop_reason is None
        if fmt is not None and by_grammar:
            assert is_right(request.text, fmt), (request.text, fmt)
            count += 1
        assert request.error is None
    return count


def run_plain_and_speculative(make: Make, jobs: list[Job], k: int = 6, **options: Any) -> list[Request]:
    """Check that speculation does not change the results, and return the requests that speculated."""
    plain, speculative = (run(make(k, **options), jobs) for k in (None, k))
    for a, b in zip(plain, speculative, strict=True):
        assert_same(outcome(b), outcome(a))
        assert (a.text, a.stop_reason) == (b.text, b.stop_reason)
    return speculative


def test_many_outputs_follow_format_with_and_without_speculation(make: Make) -> None:
    rng, jobs = random.Random(1), []
    for i in range(160):
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0, 8.0, 100.0)), seed=i, max_tokens=70,
            response_format=FORMATS[i % 4][0],
        )  # fmt: skip
        jobs.append(Job(rng.choices(range(1, 270), k=6) + list(range(30, 40)), params))
    requests = run_plain_and_speculative(make, jobs, max_num_seqs=64, enable_prefix_caching=False)
    assert assert_formats_followed(requests) > 125
    assert len({request.text for request in requests}) > 80


@pytest.mark.parametrize(("k", "mode"), [(3, "plain"), ("auto", "as-on-gpu")])
def test_guided_requests_in_mixed_batches_with_preemption(
    make: Make, model: Model, tokenizer: Tokenizer, mode: str, k: Any
) -> None:
    jobs = guided_jobs(random.Random(2), 14)
    engine = make(k, num_blocks=11, max_num_seqs=5, **MODES[mode])
    requests = run(engine, jobs)
    for request, wanted in zip(requests, run_alone(model, jobs, tokenizer=tokenizer), strict=True):
        assert_same(outcome(request), wanted, request.params)
    assert assert_formats_followed(requests) > 3
    assert engine.metrics.num_preemptions > 0
    if k == 3:
        assert engine.metrics.spec.by_drafter["grammar"][2] > 0


@pytest.mark.long
def test_captured_guided_steps_freeze_no_host_values(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton kernels captured for a first request and replayed for others, with results one step later."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=9, response_format=REGEX)
    plain = SamplingParams(temperature=0, max_tokens=6)
    greedy = replace(params, temperature=0.0, response_format=CHOICE)
    jobs = [Job([1, 2, 3, 4], params), Job([5, 6, 5, 6, 5], plain), Job([9, 2, 1], greedy)]
    jobs += [Job([40, 41, 40, 41], plain), Job([7], replace(params, seed=3))]
    small = tiny_model(num_layers=1, vocab_size=VOCAB)
    wanted = run_alone(small, jobs, tokenizer=tokenizer)
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    mode = {**MODES["as-on-gpu"], "lazy_capture": False, "max_num_seqs": 2, "max_model_len": 32}
    with launch.forced("triton"):
        small = tiny_model(num_layers=1, vocab_size=VOCAB)
        engine = make_engine(small, 2, tokenizer=tokenizer, trace=True, **mode)
        requests = run(engine, jobs)
    for request, expected in zip(requests, wanted, strict=True):
        assert_same(outcome(request), expected)
    assert engine.worker.graphs is not None


def test_more_drafts_than_a_captured_step_can_hold(make: Make) -> None:
    """64 rows of 17 tokens exceed the largest captured step, so fewer drafts are verified."""
    fmt = {"type": "choice", "choice": ["red or green or blue or red again"]}
    jobs = [Job([i, 2], SamplingParams(max_tokens=40, response_format=fmt)) for i in range(64)]
    run_plain_and_speculative(make, jobs, 16, max_num_seqs=64, max_model_len=48, **MODES["as-on-gpu"])


def test_max_tokens_cuts_anywhere(make: Make) -> None:
    whole = SamplingParams(temperature=3, seed=5, response_format=JSON, max_tokens=100)
    [full] = run(make(None), [Job([1, 2, 3], whole)])
    assert full.finish_reason == "stop"
    length = len(full.output_ids)
    jobs = [Job([1, 2, 3], replace(whole, max_tokens=n)) for n in range(1, length + 3)]
    for n, request in enumerate(run_plain_and_speculative(make, jobs), 1):
        assert request.output_ids == full.output_ids[:n]
        assert request.finish_reason == ("length" if n < length else "stop")


def test_stop_strings_bias_and_penalties(make: Make, tokenizer: Tokenizer) -> None:
    json = SamplingParams(temperature=2, seed=1, max_tokens=80, response_format=JSON)
    comma = tokenizer.encode(", ", add_special_tokens=False)
    choice = replace(json, temperature=1, logprobs=20, response_format=CHOICE)
    no = {t: -1e6 for t in range(VOCAB) if t not in (0, 1 + sorted(CHOICES).index("ab"))}
    variants = [
        replace(json, stop="c"),
        json,
        replace(json, stop=['", "b']),
        replace(json, stop_token_ids=comma),
    ]
    variants += [
        choice,
        replace(choice, frequency_penalty=2, logit_bias={5: 9}),
        replace(choice, logit_bias=no),
    ]
    stopped, full, *_, scored, penalized, biased = run_plain_and_speculative(
        make, [Job([1, 2], params) for params in variants]
    )
    assert stopped.text == full.text[: full.text.index("c")]
    assert (stopped.stop_reason, full.stop_reason) == ("c", None)
    assert {scored.text, penalized.text, biased.text} <= {*CHOICES}
    for place in scored.logprobs:
        assert sum(2.718281828**entry.logprob for entry in place.values()) == pytest.approx(1, abs=1e-4)


def test_aborted_or_failing_guide_does_not_affect_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=5, seed=1, max_tokens=80, response_format=JSON)
    engine = make(4, **MODES["as-on-gpu"])
    [wanted] = run(engine, [Job([1, 2], params)])
    well, gone, bad = (engine.add(prompt, params) for prompt in ([1, 2], [3], [4]))
    guide: Any = bad.constraint
    follow = guide.advance

    def fails(tokens: list[int]) -> int:
        if bad.num_tokens > 9:
            guide.error = "response_format failed at output token 9."
        taken: int = follow(tokens)
        return taken

    monkeypatch.setattr(guide, "advance", fails)
    for _ in range(5):
        engine.step()
    engine.abort(gone)
    finish(engine)
    assert outcome(well) == outcome(wanted)
    assert (gone.finish_reason, gone.error) == ("abort", None)
    assert (bad.finish_reason, bad.error) == ("abort", "response_format failed at output token 9.")


def test_unguided_requests_skip_masks_and_rows_are_reset(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [Job([1, 2, 1, 2], SamplingParams(temperature=1, seed=3, max_tokens=12))]
    engine = make(3, max_num_seqs=1)
    wanted = outcome(run(engine, plain)[0])
    [extension] = engine.extensions
    assert isinstance(extension, Grammar)
    assert len(extension.allowed) == 0
    neighbor = Job([1], SamplingParams(max_tokens=40, response_format=JSON))
    run(engine, [neighbor])
    with monkeypatch.context() as patch:
        patch.setattr(Grammar, "process_logits", lambda *given: pytest.fail("nothing is masked"))
        assert outcome(run(engine, plain)[0]) == wanted
    engine = make(3, max_num_seqs=2)
    run(engine, [neighbor, neighbor])
    assert outcome(run(engine, [*plain, neighbor])[0]) == wanted  # in a row that had a grammar before


def test_invalid_formats_are_rejected(make: Make, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def params(fmt: dict[str, Any]) -> SamplingParams:
        return SamplingParams(response_format=fmt)

    with pytest.raises(ValueError, match="response_format needs a tokenizer"):
        make_engine(model, 2).add([1], params({"type": "json_object"}))
    with pytest.raises(ValueError, match=r"this regex cannot be compiled: .*unclosed group"):
        make().check([1], params({"type": "regex", "regex": "(a"}))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'nanospec\[grammar\]'"):
        make().check([1], params({"type": "json_object"}))


@pytest.mark.parametrize("width", [1, 3])
def test_forced_tokens_are_accepted_in_one_step(make: Make, width: int) -> None:
    """Also as a chain in a tree."""
    fmt = {"type": "choice", "choice": ["red or green or blue"]}
    job = Job([1], SamplingParams(temperature=1, max_tokens=50, response_format=fmt))
    [request] = run(make(16, spec={"tree_width": width}, trace=True), [job])
    assert request.text == "red or green or blue"
    assert request.stats.num_accepted == request.stats.num_drafted == len(request.output_ids)
    [step] = record_of(request).steps
    assert (step.method, step.tokens) == ("grammar", request.output_ids)
    assert step.accepted == list(range(1, 1 + len(request.output_ids)))


def test_grammar_drafts_respect_limits(make: Make) -> None:
    fmt = {"type": "choice", "choice": ["red or green or blue"]}
    engine = make(3, enable_prefix_caching=False)
    result = []
    for most, own in ((1, None), (3, None), (4, None), (7, None), (6, 2)):
        params = SamplingParams(max_tokens=most, response_format=fmt, num_speculative_tokens=own)
        [request] = run(engine, [Job([1], params)])
        result.append((request.stats.num_drafted, request.stats.num_accepted, request.stats.num_steps))
    assert result == [(0, 0, 1), (2, 2, 1), (3, 3, 1), (5, 5, 2), (4, 4, 2)]


def test_draft_model_runs_for_unguided_rows_only(make: Make) -> None:
    limits_seen: list[list[int]] = []

    class Spy(Policy):
        def choose(
            self, limits: ByRow, drafter_limits: ByRow, context: int, waiting: bool
        ) -> tuple[int, int]:
            limits_seen.append(sorted(drafter_limits.values()))
            return super().choose(limits, drafter_limits, context, waiting)

    draft = tiny_model(3, vocab_size=VOCAB)
    engine = make(3, spec={"method": "draft"}, draft_model=draft, enforce_eager=True)
    engine.policy = Spy()
    variants: list[dict[str, Any]] = [{}, {"response_format": REGEX}, {"num_speculative_tokens": 0}]
    run(engine, [Job([1, 2, 3], SamplingParams(max_tokens=9, **variant)) for variant in variants])
    assert limits_seen[0] == [0, 0, 3]


def test_drafters_skip_guided_rows(make: Make) -> None:
    learned, wanted = list[int](), list[int]()

    class Repeat(Drafter):
        def propose(self, table: Table, rows: torch.Tensor, k: int) -> Proposal:
            limits = draft_limits(table, rows, k)
            wanted.extend(limits.tolist())
            return make_proposal(torch.full((len(rows), k), 5, dtype=torch.int32), limits)

        def learn(self, table: Table, proposal: Proposal, *_: Any) -> None:
            learned.extend(proposal.drafter.tolist())

    engine = make(3, drafter=Repeat())
    run(engine, [Job([1], SamplingParams(temperature=1, max_tokens=30, response_format=JSON))])
    assert (set(learned), any(wanted)) == ({NO_DRAFTER}, False)
    assert set(engine.metrics.spec.by_drafter) == {"grammar"}
    run(engine, [Job([1], SamplingParams(max_tokens=5))])
    assert set(learned) == {NO_DRAFTER, 0}


def test_real_model_extracts_json(smollm2: Path) -> None:
    spec = SpecConfig(num_speculative_tokens=6)
    llm = LLM(str(smollm2), max_num_seqs=4, kv_cache_memory="100M", max_model_len=512, spec=spec)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    fmt = {"type": "json_schema", "json_schema": {"schema": schema}}
    chat = [{"role": "user", "content": "Anna Miller is 34. Say name and age as JSON."}]
    plain, speculative = (
        llm.chat(
            chat, SamplingParams(temperature=0, max_tokens=40, response_format=fmt, num_speculative_tokens=k)
        )
        for k in (0, None)
    )
    assert plain[0].text == '{"name": "Anna Miller", "age": 34}'
    assert speculative[0].token_ids == plain[0].token_ids
    assert speculative[0].outputs[0].stats.num_steps < plain[0].outputs[0].stats.num_steps
