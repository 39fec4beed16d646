"""`nanospec serve --replicas N`: the server as a Ray Serve application.

    HTTP -> Ray's proxies -> N replicas, or MIN to MAX: complete servers of `serve/app.py`, without sockets

Ray routes each request to the less busy of two random replicas, and replaces and scales replicas.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...config import EngineConfig
from ...llm import LLM
from ..serve.app import App
from ..serve.logs import log, log_to_stderr
from ..serve.server import listen, log_ready
from ..serve.settings import ServeConfig
from .start import connect_ray, last_error, load

APP, REPLICA = "nanospec", "Replica"  # Ray's names of the application and its deployment
OTHER_REQUESTS = 32  # in addition to running and waiting completions: models, tokenization, the page
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


class Replica(App):
    """The app of a replica. Its page /metrics is that of all replicas."""

    def __init__(self, load: Callable[..., LLM], config: ServeConfig, level: str) -> None:
        log_to_stderr(level)
        llm = load(seed=random.getrandbits(28))  # replicas must not draw the same samples
        super().__init__(llm, config, str(config.served_model_name))

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        self.engine.start()
        return self.asgi()

    async def check_health(self) -> None:
        """Raise RuntimeError if Ray should replace this replica."""
        if not self.engine.is_alive:
            raise RuntimeError(self.engine.fatal_error or "the engine's steps fail repeatedly")

    async def own_metrics(self) -> list[Metric]:
        """Return the replica's metrics; each sample has a label `replica`."""
        metrics = await asyncio.to_thread(lambda: list(self.metrics.registry.collect()))
        label = {"replica": serve.get_replica_context().replica_id.unique_id}
        for metric in metrics:
            metric.samples = [each._replace(labels=each.labels | label) for each in metric.samples]
        return metrics

    async def show_metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas as one page."""
        replicas = serve.get_deployment_handle(REPLICA, APP).broadcast("own_metrics")
        merged: dict[str, Metric] = {}
        for metrics in await replicas.results_async(timeout_s=4.0, return_exceptions=True):
            for metric in metrics if isinstance(metrics, list) else ():
                if (first := merged.setdefault(metric.name, metric)) is not metric:
                    first.samples += metric.samples
        registry: Any = SimpleNamespace(collect=merged.values)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def run(
    config: ServeConfig, folder: Path, model: str, options: dict[str, Any], scale: tuple[int, int], level: str
) -> int:
    """Deploy replicas, wait for a signal, and return the exit status. Within `scale` (minimum, maximum), Ray
    starts more replicas if each has more requests than rows."""
    engine, log_fields = EngineConfig(**options), {"replicas": ":".join(map(str, sorted(set(scale))))}
    log.info("starting", extra={"log_fields": log_fields})
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with redirect_stdout(sys.stderr), connect_ray(scale[1], engine, log_to_driver=True) as bundle:
        if serve.status().applications:
            raise ValueError("Ray Serve already runs an application; run `serve shutdown` to end it.")
        with listen(config) as listener:  # checks that the port is free
            config = replace(config, port=listener.getsockname()[1])
        serve.start(http_options={"host": config.host, "port": config.port}, logging_config=QUIET)
        rows, bounds = engine.max_num_seqs, {"min_replicas": scale[0], "max_replicas": scale[1]}
        deployment = serve.deployment(
            serve.ingress()(Replica), name=REPLICA, logging_config=QUIET, max_constructor_retry_count=2,
            autoscaling_config={**bounds, "target_ongoing_requests": rows},
            max_ongoing_requests=rows + config.max_queue + OTHER_REQUESTS,
            ray_actor_options={"num_cpus": bundle.cpus, "num_gpus": bundle.gpus},
            graceful_shutdown_timeout_s=config.drain_timeout,
        )  # fmt: skip
        try:
            load_replica = partial(load, folder.absolute(), model, bundle, options)
            deploy(deployment.bind(load_replica, config, level))
            log_ready(config, (config.host, config.port), str(config.served_model_name), log_fields)
            wait_for_signal()
            while APP in serve.status().applications:
                with suppress(TimeoutError):  # after a minute, with requests still running
                    serve.delete(APP)
        finally:
            if "RAY_ADDRESS" in os.environ:  # a local Ray ends anyway
                serve.shutdown()
        log.info("ended")
    return 0


def deploy(app: serve.Application) -> None:
    """Deploy the application and wait until it is ready. Raises ValueError if its replicas cannot start."""
    with redirect_stdout(io.StringIO()) as discarded, redirect_stderr(discarded):
        try:
            serve.run(app, name=APP, logging_config=QUIET)
        except RuntimeError:
            deployments = serve.status().applications[APP].deployments.values()
            reason = last_error("\n".join(each.message for each in deployments))
            serve.delete(APP)
            raise ValueError(reason or "the replicas could not start; see Ray's logs.") from None


def wait_for_signal() -> None:
    """Wait for Ctrl-C or SIGTERM. A second one ends the process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            signal.pause()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
