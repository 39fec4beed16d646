"""Many concurrent clients: outputs do not depend on the load, and metrics add up."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanospec import LLM, SamplingParams, SpecConfig
from tests.drive import MODES
from tests.nanospec.apps.serve.conftest import MODEL, Served, serving
from tests.nanospec.apps.serve.test_api import events
from tests.nanospec.test_llm import ALPHABET, after, folder, make

__all__ = ["folder"]


@pytest.fixture(params=[("plain", None), ("as-on-gpu", None), ("plain", 200), ("plain", "traced")], ids=str)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """Also with so little memory that requests are preempted, and with tracing."""
    mode, memory = request.param
    options: dict[str, Any] = {**MODES[mode], "max_num_batched_tokens": 32}
    if memory == "traced":
        options["trace"] = True
    elif memory:
        options["kv_cache_memory"] = small_kv_cache(folder)
    with serving(make(folder, **options)) as served:
        yield served


def small_kv_cache(folder: Path) -> int:
    """Return a KV cache size in bytes for about 1.5 outputs of maximum length."""
    llm = make(folder)
    return int(llm.engine.worker.kv_cache.nbytes / llm.engine.worker.num_blocks * 12)


def request_body(i: int) -> dict[str, Any]:
    """Return request `i`, with seed `i`."""
    chance = random.Random(i)
    body: dict[str, Any] = {
        "prompt": after(ALPHABET[: 1 + i % 20]), "temperature": chance.choice([0, 25]), "seed": i,
        "max_tokens": chance.randint(1, 60), "n": chance.choice([1, 1, 2]), "ignore_eos": i % 3 == 0,
        "top_p": chance.choice([1, 0.9]), "num_speculative_tokens": chance.choice([None, None, 0, 2]),
    }  # fmt: skip
    if i % 5 == 0:
        body["stop"] = ["p"]
    return body


def test_outputs_under_load_match_offline(server: Served, offline: LLM) -> None:
    def one(i: int) -> list[str]:
        body = request_body(i)
        if i % 2:
            given = server.post("/v1/completions", body).json()
            return [choice["text"] for choice in given["choices"]]
        texts = [""] * body["n"]
        for chunk in events(server.post("/v1/completions", {**body, "stream": True}).text)[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts

    with ThreadPoolExecutor(24) as pool:
        actual = list(pool.map(one, range(48)))
    for i, texts in enumerate(actual):
        body = request_body(i)
        [expected] = offline.generate(body.pop("prompt"), SamplingParams(**body))
        assert texts == [done.text for done in expected.outputs], i


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


@pytest.mark.parametrize("mode", ["plain", "as-on-gpu"])
def test_metrics_add_up(folder: Path, mode: str) -> None:
    with serving(make(folder, **MODES[mode]), max_queue=0) as server:
        before = metrics_of(server)
        assert before["time_to_first_token_seconds_count",] == 0
        bodies = [{**request_body(i), "n": 1, "stream": i % 2 == 0} for i in range(12)]
        for body in bodies:
            assert server.post("/v1/completions", body).status_code == 200
        server.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, "/v1/completions", {**bodies[1], "n": 3, "max_tokens": 9})
            server.wait_until(lambda: server.app.engine.num_outputs == 3)
            assert server.post("/v1/completions", {**bodies[0], "n": 2}).status_code == 429
            server.gate.set()
            running.result()
        server.settle()
        actual, spec = metrics_of(server), server.llm.engine.metrics.spec
    assert actual["request_success_total", "length"] + actual["request_success_total", "stop"] == 15
    assert actual["http_requests_total", "/v1/completions", "429"] == 1
    assert actual["http_requests_total", "/v1/completions", "200"] == 13
    for name in ("queue", "prefill", "decode"):
        assert actual[f"request_{name}_time_seconds_count",] == 15
        assert actual[f"request_{name}_time_seconds_sum",] >= 0
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert actual[f"{name}_seconds_count",] == 15
    assert actual["generation_tokens_total",] == spec.num_tokens == actual["request_generation_tokens_sum",]
    assert actual["spec_decode_num_draft_tokens_total",] == spec.num_drafted
    assert actual["spec_decode_num_accepted_tokens_by_drafter_total", "ngram"] == spec.num_accepted > 0
    by_k = {int(key[1]): n for key, n in actual.items() if key[0] == "spec_decode_steps_by_k_total"}
    assert sum(by_k.values()) == spec.num_steps
    assert sum(k * n for k, n in by_k.items()) == spec.num_drafted
    by_place = [n for key, n in actual.items() if key[0] == "spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(by_place) == spec.num_accepted
    assert actual["prefix_cache_hits_total",] > 0
    assert actual["prefix_cache_queries_total",] > actual["prefix_cache_hits_total",]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert actual[name,] == 0
    assert actual["stage_seconds_total", "forward"] > 0 or mode != "plain"
    buckets = [n for key, n in actual.items() if key[0] == "steps_by_bucket_total"]
    assert sum(buckets) == (actual["steps_total",] if mode == "as-on-gpu" else 0)


def test_running_and_waiting_requests_are_in_metrics(folder: Path) -> None:
    with serving(make(folder), max_queue=8) as server:
        engine, shown = server.llm.engine, []
        step = engine.step

        def observed_step() -> Any:
            actual = step()
            samples = server.app.metrics.samples()
            shown.append({name: next(iter(values.values()), 0) for name, _, values, *_ in samples})
            return actual

        engine.step = observed_step  # type: ignore[method-assign]
        server.post("/v1/completions", {"prompt": after("a"), "n": 9, "max_tokens": 20})
        engine.step = step  # type: ignore[method-assign]
    assert max(each["num_requests_running"] for each in shown) == 4
    assert max(each["num_requests_waiting"] for each in shown) == 5
    assert max(each["kv_cache_usage_perc"] for each in shown) > 0


def test_rejected_drafts_are_streamed_when_tracing(folder: Path) -> None:
    with serving(make(folder, trace=True)) as server:
        body = {
            "prompt": "abcabdabcabd", "max_tokens": 30, "temperature": 30, "seed": 4, "stream": True,
            "stream_options": {"include_drafts": True, "include_usage": True},
        }  # fmt: skip
        chunks = events(server.post("/v1/completions", body).text)[:-1]
    steps = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    usage = chunks[-1]["usage"]["speculation"]
    rejected = [text for each in steps for text in each["rejected"]]
    assert len(rejected) == usage["num_drafted"] - usage["num_accepted"] > 0
    assert all(set(text) <= set(ALPHABET + "<e>!\ufffd") for text in rejected)


def test_dashboard_uses_existing_metrics(folder: Path) -> None:
    dashboard = (Path(__file__).parents[4] / "docs" / "grafana.json").read_text(encoding="utf-8")
    panels = [panel for panel in json.loads(dashboard)["panels"] if panel["type"] != "row"]
    expressions = {target["expr"] for panel in panels for target in panel["targets"]}
    names = {name for expression in expressions for name in re.findall(r"nanospec:\w+", expression)}
    with serving(make(folder, **MODES["as-on-gpu"])) as server:
        server.post("/v1/completions", request_body(1))
        there = set(re.findall(r"^nanospec:\w+", server.get("/metrics").text, re.MULTILINE))
    assert names <= there
    assert len(names) > 20
    assert "sum(rate(nanospec:steps_total[$__rate_interval]))" in expressions


def test_real_model_in_bf16_is_bitwise_identical_under_load(smollm2: Path) -> None:
    """Bitwise, log-probabilities included. Greedy and sampled requests overlap, with speculation."""

    def body(i: int) -> dict[str, Any]:
        text = f"def f{i}(x):\n    return x + {i}\n\ndef g{i}(x):\n    return x - {i}\n\n" * (1 + i % 3)
        drawn = {"temperature": 0.7, "top_p": 0.9} if i % 2 else {"temperature": 0}
        return {"prompt": text, "seed": i, "max_tokens": 8 + 4 * (i % 4), "logprobs": 2, **drawn}

    spec = SpecConfig(num_speculative_tokens=5)  # "auto" may see that the machine is busy
    llm = LLM(smollm2, spec=spec, max_num_seqs=6, max_model_len=512, max_num_batched_tokens=64)
    actual: dict[int, Any] = {}
    with serving(llm) as server, ThreadPoolExecutor(6) as pool:

        def ask_for(i: int) -> None:
            actual[i] = server.post("/v1/completions", body(i)).json()["choices"][0]

        list(pool.map(ask_for, range(9)))
    num_accepted = 0
    for i, choice in actual.items():
        request = body(i)
        [alone] = llm.generate(request.pop("prompt"), SamplingParams(**request))
        assert choice["text"] == alone.text
        own = [at[token].logprob for token, at in zip(alone.token_ids, alone.logprobs)]
        assert choice["logprobs"]["token_logprobs"] == own
        num_accepted += alone.stats.num_accepted
    assert num_accepted > 10
