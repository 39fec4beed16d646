"""Figures of several replicas as one page for Prometheus, each with the name of its replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families


def together(texts: Mapping[str, str]) -> tuple[bytes, str]:
    """The pages of replicas by name as one, and its media type: every figure has a label `replica`."""
    found: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Given(found))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Given:
    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.values()
