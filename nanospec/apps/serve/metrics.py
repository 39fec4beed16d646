"""Figures for Prometheus, under the names that vLLM has for them, with "nanospec:" before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ...engine.request import Request
from ...outputs import Completion
from .loop import EngineLoop

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)
SIZES = (1, 10, 100, 1000, 10000, 100000)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", LONG),
    "inter_token_latency_seconds": ("Between the tokens of an output", SHORT),
    "request_queue_time_seconds": ("From arrival to a row", LONG),
    "request_prefill_time_seconds": ("From a row to the first token", LONG),
    "request_decode_time_seconds": ("From the first token to the end", LONG),
    "e2e_request_latency_seconds": ("From arrival to the end of an output", LONG),
    "request_prompt_tokens": ("Tokens of an output's prompt", SIZES),
    "request_generation_tokens": ("Tokens of an output", SIZES),
}


class ServerMetrics:
    """Times and sizes of requests, counted as they end, and the engine's own counters, read on a scrape."""

    def __init__(self, engine: EngineLoop, model: str, responses: Mapping[tuple[str, int], int]) -> None:
        prometheus.disable_created_metrics()
        self._loop, self._model, self._responses = engine, model, responses
        self.registry = prometheus.CollectorRegistry()
        names: Any = {"labelnames": ["model_name"], "registry": self.registry}
        self._histograms = {
            name: prometheus.Histogram(f"nanospec:{name}", text, buckets=buckets, **names).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        names["labelnames"] = ["model_name", "finished_reason"]
        self._ended = prometheus.Counter("nanospec:request_success", "Outputs by what ended them", **names)
        self.registry.register(self)
        prometheus.ProcessCollector(registry=self.registry)
        engine.on_tokens, engine.on_done = self.tokens, self.done

    def tokens(self, seconds: float, count: int) -> None:
        """Count `count` tokens of an output, so long after those before: all but the last of them at once."""
        if count:
            self._histograms["inter_token_latency_seconds"].observe(seconds / count)

    def done(self, output: Completion, request: Request) -> None:
        """Count an output that has ended."""
        count, arrival, start = len(output.token_ids), request.arrival_time, request.start_time
        observed = {"e2e_request_latency_seconds": output.seconds}
        observed |= {"request_prompt_tokens": len(request.prompt_ids), "request_generation_tokens": count}
        if start is not None:
            observed["request_queue_time_seconds"] = start - arrival
            observed["request_prefill_time_seconds"] = arrival + output.first_token_seconds - start
        if count:
            observed["time_to_first_token_seconds"] = output.first_token_seconds
            observed["request_decode_time_seconds"] = output.seconds - output.first_token_seconds
        for name, value in observed.items():
            self._histograms[name].observe(value)
        self._ended.labels(self._model, output.finish_reason).inc()

    def text(self) -> tuple[bytes, str]:
        """Return the page of metrics and its media type. Waits for a step, so not for the event loop."""
        return prometheus.generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        with self._loop.llm.shared.turn():
            figures = list(self.figures())
        for name, text, values, *labels in figures:
            family: Any = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metric = family(f"nanospec:{name}", text, labels=["model_name", *labels])
            for label_values, value in values.items():
                metric.add_metric([self._model, *label_values], value)
            yield metric

    def figures(self) -> Iterator[tuple[Any, ...]]:
        """Yield for each metric its name, its help, its values by further labels, and the names of these."""
        engine = self._loop.llm.engine
        scheduler, metrics, spec = engine.scheduler, engine.metrics, engine.metrics.spec
        for name, text, value in (
            ("num_requests_running", "Outputs that have a row", len(scheduler.running)),
            ("num_requests_waiting", "Outputs that wait for one", len(scheduler.waiting)),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache", metrics.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found there", metrics.num_cached_tokens),
            ("prompt_tokens", "Prompt tokens, cached ones too", metrics.num_prompt_tokens),
            ("generation_tokens", "Tokens generated", spec.num_tokens),
            ("num_preemptions", "Outputs that had to make room and begin again", metrics.num_preemptions),
            ("num_aborted", "Outputs ended by their clients or by errors", metrics.num_aborted),
            ("steps", "Steps of the engine", metrics.num_forward_steps),
            ("spec_decode_num_drafts", "Steps of an output that had guesses", spec.num_steps_with_drafts),
            ("spec_decode_num_draft_tokens", "Guessed tokens", spec.num_drafted),
            ("spec_decode_num_accepted_tokens", "Guessed tokens that were right", spec.num_accepted),
            ("host_gap_seconds", "Between steps while there was work", self._loop.gap_seconds),
        ):
            yield name, text, {(): value}
        used = 1 - len(scheduler.pool.free) / scheduler.pool.num_blocks
        yield "kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1", {(): used}
        for i, counted in enumerate(("drafts", "draft_tokens", "accepted_tokens")):
            values = {(drafter,): n[i] for drafter, n in spec.by_drafter.items()}
            yield f"spec_decode_num_{counted}_by_drafter", f"{counted} by drafter", values, "drafter"
        values = {(str(position),): n for position, n in enumerate(spec.accepted_by_position)}
        yield "spec_decode_num_accepted_tokens_per_pos", "Right guesses by place, from 0", values, "position"
        at_least = [spec.num_steps, *spec.drafted_by_position, 0]  # so many guesses or more
        steps = {(str(k),): at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)}
        yield "spec_decode_steps_by_k", "Steps of an output by guesses verified", steps, "k"
        stages = {(name,): stage.seconds for name, stage in engine.worker.stages.items()}
        yield "stage_seconds", "Time of the engine by what was done", stages, "stage"
        responses = {(path, str(status)): n for (path, status), n in self._responses.items()}
        yield "http_requests", "Requests by path and status", responses, "handler", "status"
        if (graphs := engine.worker.graphs) is not None:
            replays = {(str(batch), str(k)): n for (batch, k), n in graphs.replays.items()}
            yield "steps_by_bucket", "Steps by recorded bucket", replays, "batch", "k"
