"""Figures for Prometheus, under the names that vLLM has for them, with "nanospec:" before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ...engine.metrics import Metrics, SpecStats
from ...engine.request import Request
from ...outputs import Completion
from .loop import EngineLoop

SHORT = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
)
LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """What requests took, counted here as they end, and the engine's own counters, read when they are asked
    for."""

    def __init__(self, engine: EngineLoop, model: str, answered: Mapping[tuple[str, int], int]) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=True)
        names: Any = {"labelnames": ["model_name"], "registry": self.registry}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"nanospec:{name}", text, buckets=buckets, **names).labels(model)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token", LONG)
        self._between = histogram("inter_token_latency_seconds", "Between the tokens of an output", SHORT)
        self._each = histogram(
            "request_time_per_output_token_seconds", "Mean time of an output's tokens after the first", SHORT
        )
        self._queue = histogram("request_queue_time_seconds", "From arrival to a row", LONG)
        self._prefill = histogram("request_prefill_time_seconds", "From a row to the first token", LONG)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end", LONG)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end of an output", LONG)
        self._prompt = histogram("request_prompt_tokens", "Tokens of an output's prompt", SIZES)
        self._output = histogram("request_generation_tokens", "Tokens of an output", SIZES)
        labels = ["model_name", "finished_reason"]
        self._ended = Counter(
            "nanospec:request_success", "Outputs by what ended them", labels, registry=self.registry
        )
        self._refused = Counter("nanospec:requests_refused", "Requests that found the queue full", **names)
        self._model = model
        self._refused.labels(model)
        self._collector = EngineCollector(engine, model, answered)
        self.registry.register(self._collector)
        ProcessCollector(registry=self.registry)
        engine.on_tokens, engine.on_done = self.tokens, self.done

    def tokens(self, seconds: float, count: int) -> None:
        """An output got so many tokens, so long after the ones before: all but the last of them at once."""
        if count:
            self._between.observe(seconds / count)

    def done(self, output: Completion, request: Request) -> None:
        """An output has ended."""
        count, arrival, start = len(output.token_ids), request.arrival_time, request.start_time
        if start is not None:
            self._queue.observe(start - arrival)
            self._prefill.observe(arrival + output.first_token_seconds - start)
        if count:
            self._first.observe(output.first_token_seconds)
            self._decode.observe(output.seconds - output.first_token_seconds)
        if count > 1:
            self._each.observe((output.seconds - output.first_token_seconds) / (count - 1))
        self._whole.observe(output.seconds)
        self._prompt.observe(len(request.prompt_ids))
        self._output.observe(count)
        self._ended.labels(self._model, output.finish_reason).inc()

    def refused(self) -> None:
        self._refused.labels(self._model).inc()

    def text(self) -> tuple[bytes, str]:
        """All of it, and its media type. Waits for the engine's step to end: not for the event loop."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class EngineCollector:
    """The engine's counters as metrics."""

    def __init__(self, engine: EngineLoop, model: str, answered: Mapping[tuple[str, int], int]) -> None:
        self._loop, self._model, self._answered = engine, model, answered

    def describe(self) -> list[Metric]:
        return []  # nothing needs to run for the names to be known

    def collect(self) -> Iterator[Metric]:
        with self._loop.llm.shared.turn():
            found = list(self._collect())
        yield from found

    def _collect(self) -> Iterator[Metric]:
        engine = self._loop.llm.engine
        pool, running, waiting = engine.scheduler.pool, engine.scheduler.running, engine.scheduler.waiting
        yield self._gauge("num_requests_running", "Outputs that have a row", len(running))
        yield self._gauge("num_requests_waiting", "Outputs that wait for one", len(waiting))
        used = 1 - pool.num_free / pool.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1", used)
        for name, text, value in self._counts(engine.metrics):
            yield self._counter(name, text, {(): value})
        yield from self._speculation(engine.metrics.spec)
        stages = {(name,): seconds for name, seconds in engine.worker.stages.seconds.items()}
        yield self._counter("stage_seconds", "Time of the engine by what was done", stages, "stage")
        answered = {(path, str(status)): n for (path, status), n in self._answered.items()}
        yield self._counter("http_requests", "Requests by path and status", answered, "handler", "status")
        if (graphs := engine.worker.graphs) is not None:
            replays = {(str(bucket.batch), str(bucket.k)): n for bucket, n in graphs.replays.items()}
            yield self._counter("steps_by_bucket", "Steps by recorded bucket", replays, "batch", "k")
            yield self._counter("fallbacks", "Steps recorded when needed", {(): graphs.fallbacks})

    def _counts(self, metrics: Metrics) -> list[tuple[str, str, float]]:
        hits, prompts, spec = metrics.num_cached_tokens, metrics.num_prompt_tokens, metrics.spec
        return [
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", prompts),
            ("prefix_cache_hits", "Prompt tokens found there", hits),
            ("prompt_tokens", "Prompt tokens, cached ones too", prompts),
            ("prompt_tokens_cached", "Prompt tokens that were found in the cache", hits),
            ("generation_tokens", "Tokens generated", spec.num_tokens),
            ("num_preemptions", "Outputs that had to make room and begin again", metrics.num_preemptions),
            ("num_aborted", "Outputs ended by their clients or by errors", metrics.num_aborted),
            ("steps", "Steps of the engine", metrics.num_forward_steps),
            ("spec_decode_num_drafts", "Steps of an output that had guesses", spec.num_steps_with_drafts),
            ("spec_decode_num_draft_tokens", "Guessed tokens", spec.num_drafted),
            ("spec_decode_num_accepted_tokens", "Guessed tokens that were right", spec.num_accepted),
            ("host_gap_seconds", "Between steps while there was work", self._loop.gap_seconds),
        ]

    def _speculation(self, spec: SpecStats) -> Iterator[Metric]:
        """By who guessed, by place, and by how many guesses were verified."""
        for i, (name, text) in enumerate(
            (
                ("spec_decode_num_drafts_by_drafter", "Steps of an output with guesses, by who guessed"),
                ("spec_decode_num_draft_tokens_by_drafter", "Guessed tokens, by who guessed"),
                ("spec_decode_num_accepted_tokens_by_drafter", "Right guesses, by who guessed"),
            )
        ):
            yield self._counter(name, text, {(who,): n[i] for who, n in spec.by_drafter.items()}, "drafter")
        accepted = {(str(place),): n for place, n in enumerate(spec.accepted_by_position)}
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Right guesses by their place, from 0 on"
        yield self._counter(name, text, accepted, "position")
        at_least = [spec.num_steps, *spec.drafted_by_position, 0]  # so many guesses or more
        steps = {(str(k),): at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)}
        yield self._counter("spec_decode_steps_by_k", "Steps of an output by guesses verified", steps, "k")

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"nanospec:{name}", text, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric

    def _counter(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        metric = CounterMetricFamily(f"nanospec:{name}", text, labels=["model_name", *labels])
        for own, value in values.items():
            metric.add_metric([self._model, *own], value)
        return metric
