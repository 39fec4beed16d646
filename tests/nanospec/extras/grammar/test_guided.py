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
from tests.random_weights import random_heads
from tests.tape import TapeCapture
from tests.tiny import tiny_model, tiny_tokenizer

JSON, REGEX, _, CHOICE, _ = (fmt for fmt, _ in FORMATS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model() -> Model:
    """Random weights, so unguided output never follows a grammar."""
    return tiny_model(vocab_size=VOCAB)


@pytest.fixture
def make(model: Model, tokenizer: Tokenizer) -> Callable[..., Engine]:
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


def test_many_outputs_follow_format_with_and_without_speculation(make: Callable[..., Engine]) -> None:
    rng = random.Random(1)
    temperatures, jobs = (0.0, 1.0, 8.0, 100.0), []
    for i in range(400):
        fmt = FORMATS[i % 4][0]
        params = SamplingParams(
            temperature=rng.choice(temperatures), seed=i, max_tokens=70, response_format=fmt
        )
        jobs.append(Job(rng.choices(range(1, 270), k=6) + list(range(30, 40)), params))
    options = {"max_num_seqs": 64, "enable_prefix_caching": False}
    plain, speculative = (run(make(k, **options), jobs) for k in (None, 6))
    for a, b in zip(plain, speculative, strict=True):
        assert (a.output_ids, a.finish_reason, a.text) == (b.output_ids, b.finish_reason, b.text)
    assert assert_formats_followed(speculative) == assert_formats_followed(plain) > 320
    assert len({request.text for request in plain}) > 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 3, "auto"])
def test_guided_requests_in_mixed_batches_with_preemption(
    make: Callable[..., Engine], model: Model, tokenizer: Tokenizer, mode: str, k: Any
) -> None:
    jobs = guided_jobs(random.Random(f"{mode}{k}"), 24)
    engine = make(k, num_blocks=14, max_num_seqs=5, **MODES[mode])
    requests = run(engine, jobs)
    for request, wanted in zip(requests, run_alone(model, jobs, tokenizer=tokenizer), strict=True):
        assert_same(outcome(request), wanted, request.params)
    assert assert_formats_followed(requests) > 3
    assert engine.metrics.num_preemptions > 0
    if k == 3:
        assert engine.metrics.spec.by_drafter["grammar"][2] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "setup",
    [
        "ngram-tree", "draft", "draft by rejection", "draft by typical", "medusa-tree", "ngram-tree+medusa",
    ],
)  # fmt: skip
def test_guided_rows_next_to_every_drafter(
    make: Callable[..., Engine], model: Model, tokenizer: Tokenizer, setup: str, mode: str
) -> None:
    jobs = guided_jobs(random.Random(setup), 14)
    rule = setup.split(" ")[-1] if "by" in setup else "exact"
    if rule != "exact":  # unguided requests would change under this rule
        jobs = [job for job in jobs if job.params.response_format is not None]
    spec = {
        "method": setup.replace("-tree", "").split(" ")[0],
        "tree_width": 3 if "tree" in setup else 1,
        "acceptance": rule,
    }
    draft = tiny_model(3, vocab_size=VOCAB) if "draft" in setup else None
    heads = random_heads(model, 3, vocab=40) if "medusa" in setup else None
    engine = make(4, spec=spec, draft_model=draft, heads=heads, **MODES[mode])
    others = [Job(job.prompt, replace(job.params, response_format=None)) for job in jobs[:4]]
    requests = run(engine, [*jobs, *others])[: len(jobs)]
    for request, wanted in zip(requests, run_alone(model, jobs, tokenizer=tokenizer), strict=True):
        assert_same(outcome(request), wanted, request.params)
    assert_formats_followed(requests)
    names = set(engine.metrics.spec.by_drafter)
    assert "grammar" in names
    assert len(names) > 1  # unguided rows still use the drafter


@pytest.mark.long
def test_captured_guided_steps_freeze_no_host_values(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton kernels captured for a first request and replayed for others, with results one step later."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=9, response_format=REGEX)
    plain = SamplingParams(temperature=0, max_tokens=6)
    greedy = replace(params, temperature=0.0, response_format=CHOICE)
    jobs = [Job([1, 2, 3, 4], params), Job([5, 6, 5, 6, 5], plain), Job([9, 2, 1], greedy)]
    jobs += [Job([40, 41, 40, 41], plain), Job([7], replace(params, seed=3))]
    wanted = run_alone(tiny_model(num_layers=1, vocab_size=VOCAB), jobs, tokenizer=tokenizer)
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    with launch.forced("triton"):
        engine = make_engine(
            tiny_model(num_layers=1, vocab_size=VOCAB), 2, max_num_seqs=2, max_model_len=32,
            tokenizer=tokenizer, **{**MODES["as-on-gpu"], "lazy_capture": False},
        )  # fmt: skip
        requests = run(engine, jobs)
    for request, expected in zip(requests, wanted, strict=True):
        assert_same(outcome(request), expected)
    assert engine.worker.graphs is not None


def test_more_drafts_than_a_captured_step_can_hold(make: Callable[..., Engine]) -> None:
    """64 rows of 17 tokens exceed the largest captured step, so fewer drafts are verified."""
    fmt = {"type": "choice", "choice": ["red or green or blue or red again"]}
    jobs = [Job([i, 2], SamplingParams(max_tokens=40, response_format=fmt)) for i in range(64)]
    options = {"max_num_seqs": 64, "max_model_len": 48}
    plain, speculative = (run(make(k, **options, **MODES["as-on-gpu"]), jobs) for k in (None, 16))
    assert [r.output_ids for r in speculative] == [r.output_ids for r in plain]


@pytest.mark.parametrize("fmt", [JSON, REGEX, CHOICE], ids=["json", "regex", "choice"])
def test_max_tokens_cuts_anywhere(make: Callable[..., Engine], fmt: dict[str, Any]) -> None:
    whole = SamplingParams(temperature=3, seed=5, response_format=fmt, max_tokens=100)
    engines = [make(k, enable_prefix_caching=False) for k in (None, 5)]
    [full] = run(engines[0], [Job([1, 2, 3], whole)])
    assert full.finish_reason == "stop"
    length = len(full.output_ids)
    jobs = [Job([1, 2, 3], replace(whole, max_tokens=n)) for n in range(1, length + 3)]
    for requests in (run(engine, jobs) for engine in engines):
        for n, request in enumerate(requests, 1):
            assert request.output_ids == full.output_ids[:n]
            assert request.finish_reason == ("length" if n < length else "stop")


def test_stop_strings_and_tokens_end_guided_output(make: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    text = '", "b'
    params = SamplingParams(temperature=2, seed=1, max_tokens=80, response_format=JSON)
    comma = tokenizer.encode(", ", add_special_tokens=False)
    variants: list[dict[str, Any]] = [{"stop": [text]}, {"stop": "c"}, {"stop_token_ids": comma}]
    jobs = [Job([1, 2], replace(params, **variant)) for variant in variants] + [Job([1, 2], params)]
    plain, speculative = (run(make(k), jobs) for k in (None, 6))
    for a, b in zip(plain, speculative, strict=True):
        assert (a.output_ids, a.text, a.stop_reason) == (b.output_ids, b.text, b.stop_reason)
    full = speculative[3].text
    assert speculative[1].text == full[: full.index("c")]
    assert (speculative[1].stop_reason, speculative[3].stop_reason) == ("c", None)


def test_logprobs_bias_and_penalties_with_grammar(make: Callable[..., Engine]) -> None:
    params = SamplingParams(temperature=1, seed=2, max_tokens=40, logprobs=20, response_format=CHOICE)
    no = {t: -1e6 for t in range(VOCAB) if t not in (0, 1 + sorted(CHOICES).index("ab"))}
    jobs = [Job([1], params), Job([1], replace(params, frequency_penalty=2, logit_bias={5: 9}))]
    jobs.append(Job([1], replace(params, logit_bias=no)))
    plain, speculative = (run(make(k), jobs) for k in (None, 6))
    for a, b in zip(plain, speculative, strict=True):
        assert_same(outcome(b), outcome(a))
        assert b.text in CHOICES
    for place in speculative[0].logprobs:
        assert sum(2.718281828**entry.logprob for entry in place.values()) == pytest.approx(1, abs=1e-4)


def test_samples_of_one_prompt_have_separate_guides(model: Model, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, 4, tokenizer=tokenizer, max_num_seqs=4)
    params = SamplingParams(n=6, temperature=9, seed=4, max_tokens=90, response_format=JSON)
    prompt = list(range(40))
    for _ in range(2):
        requests = [engine.add(prompt, params, index) for index in range(6)]
        finish(engine)
        assert assert_formats_followed(requests) == 6
        assert len({request.text for request in requests}) == 6
    assert engine.metrics.num_cached_tokens >= 32 * 6


@pytest.mark.parametrize("mode", MODES)
def test_aborted_or_failing_guide_does_not_affect_others(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    params = SamplingParams(temperature=5, seed=1, max_tokens=80, response_format=JSON)
    engine = make(4, **MODES[mode])
    [wanted] = run(engine, [Job([1, 2], params)])
    well, gone = engine.add([1, 2], params), engine.add([3], params)
    bad = engine.add([4], params)
    assert bad.constraint is not None
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
    assert (gone.finish_reason, bad.finish_reason) == ("abort", "abort")
    assert bad.error is not None
    assert bad.error.startswith("response_format failed at output token ")
    assert gone.error is None


def test_unguided_requests_skip_masks_and_rows_are_reset(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [Job([1, 2, 1, 2], SamplingParams(temperature=1, seed=3, max_tokens=12))]
    engine = make(3, max_num_seqs=1)
    wanted = outcome(run(engine, plain)[0])
    [extension] = engine.extensions
    assert isinstance(extension, Grammar)
    assert len(extension.allowed) == 0
    run(engine, [Job([1], SamplingParams(max_tokens=5, response_format=JSON))])

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Grammar, "process_logits", never)
    assert outcome(run(engine, plain)[0]) == wanted
    monkeypatch.undo()
    neighbor = Job([1], SamplingParams(max_tokens=40, response_format=JSON))
    engine = make(3, max_num_seqs=2)
    run(engine, [neighbor, neighbor])
    assert outcome(run(engine, [*plain, neighbor])[0]) == wanted  # in a row that had a grammar before


def test_invalid_formats_are_rejected(
    make: Callable[..., Engine], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def params(fmt: dict[str, Any]) -> SamplingParams:
        return SamplingParams(response_format=fmt)

    with pytest.raises(ValueError, match="response_format needs a tokenizer"):
        make_engine(model, 2).add([1], params({"type": "json_object"}))
    with pytest.raises(ValueError, match=r"this regex cannot be compiled: .*unclosed group"):
        make().check([1], params({"type": "regex", "regex": "(a"}))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'nanospec\[grammar\]'"):
        make().check([1], params({"type": "json_object"}))


def test_trace_shows_grammar_drafts(make: Callable[..., Engine]) -> None:
    params = SamplingParams(temperature=5, seed=1, max_tokens=80, response_format=JSON)
    [request] = run(make(4, trace=True), [Job([1, 2], params)])
    assert request.extension_data is not None
    steps = request.extension_data.steps
    speculative = [step for step in steps if step.method == "grammar"]
    assert sum(len(step.accepted) for step in speculative) == request.stats.num_accepted > 0
    assert sum(step.verified for step in steps) == request.stats.num_drafted
    assert [t for step in steps for t in step.tokens] == request.output_ids


@pytest.mark.parametrize("width", [1, 3])
def test_forced_tokens_are_accepted_in_one_step(make: Callable[..., Engine], width: int) -> None:
    """Also as a chain in a tree."""
    fmt = {"type": "choice", "choice": ["red or green or blue"]}
    job = Job([1], SamplingParams(temperature=1, max_tokens=50, response_format=fmt))
    [request] = run(make(16, spec={"tree_width": width}), [job])
    assert request.text == "red or green or blue"
    assert request.stats.num_accepted == request.stats.num_drafted == len(request.output_ids)
    assert request.stats.num_steps == 1


def test_grammar_drafts_respect_limits(make: Callable[..., Engine]) -> None:
    fmt = {"type": "choice", "choice": ["red or green or blue"]}
    engine = make(3, enable_prefix_caching=False)
    result = []
    for most, own in ((1, None), (3, None), (4, None), (7, None), (6, 2)):
        params = SamplingParams(max_tokens=most, response_format=fmt, num_speculative_tokens=own)
        [request] = run(engine, [Job([1], params)])
        result.append((request.stats.num_drafted, request.stats.num_accepted, request.stats.num_steps))
    assert result == [(0, 0, 1), (2, 2, 1), (3, 3, 1), (5, 5, 2), (4, 4, 2)]


def test_draft_model_runs_for_unguided_rows_only(make: Callable[..., Engine]) -> None:
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
    for variant in variants:
        engine.add([1, 2, 3], SamplingParams(max_tokens=9, **variant))
    finish(engine)
    assert limits_seen[0] == [0, 0, 3]


def test_drafters_skip_guided_rows(make: Callable[..., Engine]) -> None:
    learned: list[int] = []
    wanted: list[int] = []

    class Repeat(Drafter):
        def propose(self, table: Table, rows: torch.Tensor, k: int) -> Proposal:
            wanted.extend(draft_limits(table, rows, k).tolist())
            return make_proposal(
                torch.full((len(rows), k), 5, dtype=torch.int32), draft_limits(table, rows, k)
            )

        def learn(self, table: Table, proposal: Proposal, *_: Any) -> None:
            learned.extend(proposal.drafter.tolist())

    guided = SamplingParams(temperature=1, max_tokens=30, response_format=JSON)
    engine = make(3, drafter=Repeat())
    run(engine, [Job([1], guided)])
    assert (set(learned), any(wanted)) == ({NO_DRAFTER}, False)
    assert set(engine.metrics.spec.by_drafter) == {"grammar"}
    run(engine, [Job([1], SamplingParams(max_tokens=5))])
    assert set(learned) == {NO_DRAFTER, 0}


def test_real_model_extracts_json(smollm2: Path) -> None:
    llm = LLM(
        str(smollm2), max_num_seqs=4, kv_cache_memory="100M", max_model_len=512,
        spec=SpecConfig(num_speculative_tokens=6),
    )  # fmt: skip
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    fmt = {"type": "json_schema", "json_schema": {"schema": schema}}
    chats = [[{"role": "user", "content": f"{name} is {age}. Say name and age as JSON."}] for name, age in
             (("Anna Miller", 34), ("Tom", 7))]  # fmt: skip
    result = []
    for k in (0, None):
        params = SamplingParams(temperature=0, max_tokens=40, response_format=fmt, num_speculative_tokens=k)
        result.append([output.outputs[0] for output in llm.chat(chats, params)])
    texts = ['{"name": "Anna Miller", "age": 34}', '{"name": "Tom", "age": 7}']
    assert [done.text for done in result[0]] == texts
    assert [done.token_ids for done in result[1]] == [done.token_ids for done in result[0]]
    assert result[1][0].stats.num_steps < result[0][0].stats.num_steps
