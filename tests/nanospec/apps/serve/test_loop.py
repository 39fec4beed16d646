"""The engine's thread: metrics add up, and every job ends with a result or an error."""

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
from prometheus_client.parser import text_string_to_metric_families

from nanospec import SamplingParams
from nanospec.apps.openai_format import COMPLETIONS
from nanospec.apps.serve.jobs import ENDED, FAILED, Job, JobFailed
from nanospec.apps.serve.loop import MAX_FAILURES, EngineLoop
from tests.alphabet import after, make
from tests.drive import MODES
from tests.nanospec.apps.serve.conftest import MODEL, Served, serving
from tests.util import eventually

BODY = {"prompt": after("abc"), "temperature": 0, "max_tokens": 60}
Blocked = tuple[EngineLoop, list[int], Callable[[], None]]


def metrics_of(server: Served) -> dict[tuple[str, ...], float]:
    """Return the metrics' values by name and labels other than the model's."""
    actual = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels.get("model_name", MODEL) == MODEL
            key = (sample.name.removeprefix("nanospec:"), *labels.values())
            actual[key] = sample.value
    return actual


def test_metrics_add_up(folder: Path) -> None:
    shown: list[dict[str, float]] = []
    llm = make(folder, **MODES["as-on-gpu"])
    with serving(llm, max_queue=5) as server, ThreadPoolExecutor(1) as pool:
        assert metrics_of(server)["time_to_first_token_seconds_count",] == 0
        for i in range(6):
            body = {**BODY, "max_tokens": 1 + 12 * i, "stream": i % 2 == 0}
            assert server.post(COMPLETIONS, body).status_code == 200
        step = llm.engine.step

        def observed_step() -> Any:
            actual = step()
            samples = server.app.metrics.samples()
            shown.append({name: next(iter(values.values()), 0) for name, _, values, *_ in samples})
            return actual

        llm.engine.step = observed_step  # type: ignore[method-assign]
        server.gate.clear()
        running = pool.submit(server.post, COMPLETIONS, {**BODY, "n": 9})
        eventually(lambda: server.app.engine.num_outputs == 9)
        refused = server.post(COMPLETIONS, {"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        server.gate.set()
        running.result()
        server.settle()
        triton.knobs.compilation.listener()  # as when Triton compiles a kernel
        actual, spec = metrics_of(server), llm.engine.metrics.spec
    assert actual["kernels_compiled_total",] == llm.metrics()["num_compiled"] == 1
    assert max(each["num_requests_running"] for each in shown) == 4
    assert max(each["num_requests_waiting"] for each in shown) == 5
    assert max(each["kv_cache_usage_perc"] for each in shown) > 0
    assert actual["request_success_total", "length"] + actual["request_success_total", "stop"] == 15
    assert [actual["http_requests_total", COMPLETIONS, status] for status in ("200", "429")] == [7, 1]
    names = [f"request_{stage}_time" for stage in ("queue", "prefill", "decode")]
    for name in (*names, "time_to_first_token", "e2e_request_latency"):
        assert actual[f"{name}_seconds_count",] == 15
    total = sum(actual[f"{name}_seconds_sum",] for name in names)
    assert total == pytest.approx(actual["e2e_request_latency_seconds_sum",])
    assert 0 < actual["inter_token_latency_seconds_sum",] <= actual["request_decode_time_seconds_sum",] + 0.1
    assert actual["generation_tokens_total",] == spec.num_tokens == actual["request_generation_tokens_sum",]
    assert actual["prompt_tokens_total",] == actual["request_prompt_tokens_sum",]
    assert actual["spec_decode_num_draft_tokens_total",] == spec.num_drafted
    assert actual["spec_decode_num_accepted_tokens_by_drafter_total", "ngram"] == spec.num_accepted > 0
    by_k = {int(key[1]): n for key, n in actual.items() if key[0] == "spec_decode_steps_by_k_total"}
    assert sum(by_k.values()) == spec.num_steps
    assert sum(k * n for k, n in by_k.items()) == spec.num_drafted
    by_place = [n for key, n in actual.items() if key[0] == "spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(by_place) == spec.num_accepted
    assert 0 < actual["prefix_cache_hits_total",] < actual["prefix_cache_queries_total",]
    assert actual["num_requests_running",] == actual["num_requests_waiting",] == 0
    buckets = [n for key, n in actual.items() if key[0] == "steps_by_bucket_total"]
    assert sum(buckets) == actual["steps_total",]
    assert sum(seconds for key, seconds in actual.items() if key[0] == "stage_seconds_total") > 0
    dashboard = (Path(__file__).parents[4] / "docs" / "grafana.json").read_text(encoding="utf-8")
    used = set(re.findall(r"nanospec:(\w+)", dashboard))
    assert len(used) > 20
    assert used <= {key[0] for key in actual}


def fail(*_: Any) -> Any:
    raise RuntimeError("broken")


async def end_of(job: Job) -> str:
    """Return the message of the failure that ends the job."""
    try:
        async for _ in job:
            pass
    except JobFailed as error:
        return str(error)
    return ""


@pytest.fixture
def blocked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Blocked:
    """Return an engine loop with blocked steps, a prompt, and a function that unblocks the steps."""
    llm, go = make(folder), threading.Event()
    step = llm.shared.step
    monkeypatch.setattr(llm.shared, "step", lambda: (go.wait(20), step())[1])
    return EngineLoop(llm, 10), llm.tokenizer.encode(after("a")), go.set


@pytest.mark.parametrize("message", [ENDED, FAILED])
def test_jobs_submitted_around_the_last_step_fail(blocked: Blocked, monkeypatch: Any, message: str) -> None:
    """Submit jobs before, during and after the last step, which is stopped or cannot clean up."""
    loop, ids, go = blocked
    if message == FAILED:
        monkeypatch.setattr(loop.llm.engine, "step", fail)
        monkeypatch.setattr(loop.llm.engine, "abort_all", fail)

    async def run() -> list[str]:
        loop.start()
        jobs = [loop.submit([ids, ids], SamplingParams(n=2))]
        while not loop._live:
            await asyncio.sleep(0.005)
        jobs.append(loop.submit([ids], SamplingParams(n=3)))
        healthy = []
        for loop.failures in (MAX_FAILURES - 1, MAX_FAILURES):
            healthy.append(loop.is_alive)
        assert healthy == [True, False]
        if message == ENDED:
            stop = asyncio.ensure_future(loop.stop())
            await asyncio.sleep(0.02)
            go()
            await stop
        go()
        ends = [await end_of(job) for job in jobs]
        return [*ends, await end_of(loop.submit([ids], SamplingParams()))]

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [message] * 3
    assert (loop.num_outputs, loop._jobs) == (0, set())
    assert (loop.fatal_error is None) == (message == ENDED)


def test_time_before_admission_counts(blocked: Blocked) -> None:
    loop, ids, go = blocked

    async def run() -> float:
        loop.start()
        loop.start()  # has no effect
        loop.submit([ids], SamplingParams(max_tokens=2))
        while not loop._live:
            await asyncio.sleep(0.005)
        second = loop.submit([ids], SamplingParams(max_tokens=2))
        await asyncio.sleep(0.2)
        go()
        [done] = [delta.done async for delta in second if delta is not None and delta.done is not None]
        await loop.stop()
        return done.seconds

    assert asyncio.run(asyncio.wait_for(run(), 20)) > 0.2


def test_number_of_outputs_is_limited(blocked: Blocked) -> None:
    loop, ids, _ = blocked
    loop._guard(fail)
    assert loop.failures == 1
    with pytest.raises(ValueError, match=r"The request has 12 outputs .*, but the limit is 10\."):
        loop.submit([ids, ids], SamplingParams(n=6))
    loop.submit([ids], SamplingParams(n=10)).abort()
    loop.submit([ids], SamplingParams(n=3))
    job = loop.submit([ids], SamplingParams(n=7))
    with pytest.raises(asyncio.QueueFull):
        loop.check_capacity()
    for _ in range(2):  # the second abort has no effect
        job.abort()
        assert loop.num_outputs == 3
    loop.check_capacity(7)
    with pytest.raises(asyncio.QueueFull):
        loop.submit([ids], SamplingParams(n=8))
    assert loop.num_outputs == 3
