"""Prometheus metrics, with vLLM's names under the prefix "nanospec:"."""

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
    "time_to_first_token_seconds": ("Time to first token in seconds", LONG),
    "inter_token_latency_seconds": ("Inter-token latency in seconds", SHORT),
    "request_queue_time_seconds": ("Time spent waiting in seconds", LONG),
    "request_prefill_time_seconds": ("Time spent in prefill in seconds", LONG),
    "request_decode_time_seconds": ("Time spent in decode in seconds", LONG),
    "e2e_request_latency_seconds": ("End-to-end latency of an output in seconds", LONG),
    "request_prompt_tokens": ("Number of prompt tokens of an output", SIZES),
    "request_generation_tokens": ("Number of generated tokens of an output", SIZES),
}


class ServerMetrics:
    """Times and sizes of outputs, observed as they finish, and the engine's counters, read at each scrape."""

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
        self._ended = prometheus.Counter("nanospec:request_success", "Number of finished outputs", **names)
        self.registry.register(self)
        prometheus.ProcessCollector(registry=self.registry)
        engine.on_tokens, engine.on_done = self.tokens, self.done

    def tokens(self, seconds: float, count: int) -> None:
        """Observe the mean latency of `count` new tokens, `seconds` after the output's previous ones."""
        if count:
            self._histograms["inter_token_latency_seconds"].observe(seconds / count)

    def done(self, output: Completion, request: Request) -> None:
        """Observe a finished output."""
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
        """Return the metrics and their media type. Waits for a step, so it must not run in the event loop."""
        return prometheus.generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        with self._loop.llm.shared.turn():
            samples = list(self.samples())
        for name, text, values, *labels in samples:
            family: Any = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metric = family(f"nanospec:{name}", text, labels=["model_name", *labels])
            for label_values, value in values.items():
                metric.add_metric([self._model, *label_values], value)
            yield metric

    def samples(self) -> Iterator[tuple[Any, ...]]:
        """Yield each metric's name, help, values by label values, and label names besides `model_name`."""
        engine = self._loop.llm.engine
        scheduler, metrics, spec = engine.scheduler, engine.metrics, engine.metrics.spec
        for name, text, value in (
            ("num_requests_running", "Number of running outputs", len(scheduler.running)),
            ("num_requests_waiting", "Number of waiting outputs", len(scheduler.waiting)),
            ("prefix_cache_queries", "Prefix cache queries, in tokens", metrics.num_prompt_tokens),
            ("prefix_cache_hits", "Prefix cache hits, in tokens", metrics.num_cached_tokens),
            ("prompt_tokens", "Number of prompt tokens, including cached ones", metrics.num_prompt_tokens),
            ("generation_tokens", "Number of generated tokens", spec.num_tokens),
            ("num_preemptions", "Number of preemptions", metrics.num_preemptions),
            ("num_aborted", "Number of outputs aborted by clients or errors", metrics.num_aborted),
            ("steps", "Number of engine steps", metrics.num_forward_steps),
            ("kernels_compiled", "Number of GPU kernels compiled after the start", engine.num_compiled),
            ("spec_decode_num_drafts", "Steps of outputs with draft tokens", spec.num_steps_with_drafts),
            ("spec_decode_num_draft_tokens", "Number of draft tokens", spec.num_drafted),
            ("spec_decode_num_accepted_tokens", "Number of accepted draft tokens", spec.num_accepted),
            ("host_gap_seconds", "Idle time between steps in seconds", self._loop.gap_seconds),
        ):
            yield name, text, {(): value}
        used = 1 - scheduler.pool.num_free / scheduler.pool.num_blocks
        yield "kv_cache_usage_perc", "KV cache usage, from 0 to 1", {(): used}
        for i, counted in enumerate(("drafts", "draft_tokens", "accepted_tokens")):
            values = {(drafter,): n[i] for drafter, n in spec.by_drafter.items()}
            yield f"spec_decode_num_{counted}_by_drafter", f"Number of {counted}", values, "drafter"
        values = {(str(position),): n for position, n in enumerate(spec.accepted_by_position)}
        yield "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position", values, "position"
        at_least = [spec.num_steps, *spec.drafted_by_position, 0]  # steps with at least k drafts
        steps = {(str(k),): at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)}
        yield "spec_decode_steps_by_k", "Steps of outputs by number of draft tokens", steps, "k"
        stages = {(name,): stage.seconds for name, stage in engine.worker.stages.items()}
        yield "stage_seconds", "Time by engine stage in seconds", stages, "stage"
        responses = {(path, str(status)): n for (path, status), n in self._responses.items()}
        yield "http_requests", "Number of HTTP requests by path and status", responses, "handler", "status"
        if (graphs := engine.worker.graphs) is not None:
            replays = {(str(batch), str(k)): n for (batch, k), n in graphs.replays.items()}
            yield "steps_by_bucket", "Number of steps by captured bucket", replays, "batch", "k"
