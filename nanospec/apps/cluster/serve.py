"""`nanospec serve --replicas N`: the server as a Ray Serve application.

    HTTP -> Ray's proxies -> Ingress (`front.py`) -> ServingEngine: N, or MIN to MAX, complete servers

If the command is run again on the same Ray, with other options, Ray replaces the replicas one by one, and the
old ones finish their requests. The earlier command then exits, because its deployment was replaced.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message, Scope

from ...config import EngineConfig
from ...llm import LLM
from ..serve.app import App
from ..serve.logs import log, log_to_stderr
from ..serve.server import listen, log_ready
from ..serve.settings import ServeConfig
from .front import LINGER, Front, Sender
from .routing import Balancer
from .start import Bundle, connect_ray, last_error, load

APP = "nanospec"
OTHER_REQUESTS = 32  # in addition to running and waiting completions: models, tokenization, the page
TRIES = 2  # to start a replica
POLL = 2.0  # seconds between checks of the deployment
TIMEOUT = 4.0  # seconds for replicas to return their metrics
Loader = Callable[..., LLM]  # `load` for a replica, which may add options
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


class ServingEngine:
    """A replica: the server of `serve/app.py` without sockets."""

    def __init__(self, load: Loader, config: ServeConfig) -> None:
        log_to_stderr("warning")  # the ingress logs the requests
        self._name = serve.get_replica_context().replica_id.unique_id
        llm = load(seed=random.getrandbits(28))  # replicas must not draw the same samples
        self._app = App(llm, config, str(config.served_model_name))
        self._sender = Sender(self._app.asgi())

    async def ask(self, scope: Scope, body: bytes, prefixes: Sequence[bytes]) -> AsyncIterator[list[Message]]:
        """Yield the response to a request as ASGI messages, then fields for the log. The router uses
        `prefixes`."""
        self._app.engine.start()
        scope["state"] = {}
        async with aclosing(self._sender.lists(scope, body)) as answer:
            async for messages in answer:
                yield messages
        yield [{"log_fields": {**scope["state"].get("log_fields", {}), "replica": self._name}}]

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics page."""
        return self._name, (await asyncio.to_thread(self._app.metrics.text))[0].decode()

    async def check_health(self) -> None:
        """Raise RuntimeError if Ray should replace this replica."""
        engine = self._app.engine
        engine.start()
        if not engine.is_alive:
            raise RuntimeError(engine.fatal_error or "the engine's steps fail repeatedly")


class ToReplica(RequestRouter):
    """Routes a request to the replica that the balancer chooses for its `prefixes`, or if that is full, to
    the one with the shortest queue."""

    def initialize_state(self, slack: int) -> None:
        self.balancer = Balancer(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait before retrying if all replicas are full
        replicas, running = {r.replica_id.unique_id: r for r in candidate_replicas}, self.balancer.running
        chosen = self.balancer.choose(pending_request.kwargs["prefixes"], replicas)
        running[chosen] += 1  # until it is sent, so that requests routed in the meantime count it
        pending_request.future.add_done_callback(lambda _: running.subtract([chosen]))
        return [[replicas[chosen]], candidate_replicas]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.balancer.running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.balancer.running[replica_id.unique_id] -= 1


class Ingress(Front):
    """The deployment that receives requests from Ray's proxies."""

    def __init__(self, engines: Any, config: ServeConfig, level: str, stamp: str) -> None:
        log_to_stderr(level)
        self._stamp = stamp
        ask = engines.ask.options(stream=True)

        async def metrics() -> dict[str, str]:
            with suppress(Exception):  # raised by Ray if there is no replica or one is too slow
                pages = engines.broadcast("metrics").results_async(timeout_s=TIMEOUT, return_exceptions=True)
                return dict(each for each in await pages if isinstance(each, tuple))
            return {}

        super().__init__(config, lambda scope, body, names: ask.remote(scope, body, prefixes=names), metrics)

    __serve_build_asgi_app__ = Front.asgi

    async def stamp(self) -> str:
        """Return the stamp of the command that deployed this."""
        return self._stamp


def application(
    load: Loader, config: ServeConfig, bundle: Bundle, rows: int, scale: tuple[int, int], *args: str
) -> serve.Application:
    """Return the application: an ingress and engines. Within `scale` (minimum, maximum), Ray starts more
    engines if each has more requests than rows. `args` are the ingress's log level and stamp."""
    low, high = scale
    bounds = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": rows}
    scaling: dict[str, Any] = {"autoscaling_config": bounds} if low < high else {"num_replicas": low}
    router_options = {"slack": max(rows // 4, 1)}
    router = RequestRouterConfig(request_router_class=ToReplica, request_router_kwargs=router_options)
    engines = serve.deployment(
        ServingEngine, **scaling, max_ongoing_requests=rows + config.max_queue + OTHER_REQUESTS,
        ray_actor_options={"num_cpus": bundle.cpus, "num_gpus": bundle.gpus}, request_router_config=router,
        graceful_shutdown_timeout_s=config.drain_timeout, max_constructor_retry_count=TRIES,
        logging_config=QUIET,
    )  # fmt: skip
    ingress = serve.deployment(
        serve.ingress()(Ingress), max_ongoing_requests=config.max_connections,
        ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=config.drain_timeout + LINGER,
        logging_config=QUIET,
    )  # fmt: skip
    return ingress.bind(engines.bind(load, config), config, *args)


def run(
    config: ServeConfig, folder: Path, model: str, options: dict[str, Any], scale: tuple[int, int], level: str
) -> int:
    """Deploy the application, wait for a signal or a newer deployment, and return the exit status."""
    name, engine = str(config.served_model_name), EngineConfig(**options)
    log_fields = {"replicas": ":".join(map(str, sorted(set(scale))))}
    log.info("starting", extra={"log_fields": log_fields})
    with redirect_stdout(sys.stderr), connect_ray(scale[1], engine, log_to_driver=True) as bundle:
        config, is_new = start_serve(config)
        load_replica, stamp = partial(load, folder.absolute(), model, bundle, options), uuid.uuid4().hex
        app = application(load_replica, config, bundle, engine.max_num_seqs, scale, level, stamp)
        handle = deploy(app, is_new)
        log_ready(config, (config.host, config.port), name, log_fields)
        if wait_for_signal(handle, stamp):
            with suppress(Exception):  # raised by Ray if there is no ingress at the moment
                handle.drain.remote().result(timeout_s=config.drain_timeout + LINGER)
            if "RAY_ADDRESS" in os.environ:  # a local Ray ends anyway
                serve.delete(APP)
                if is_new:
                    serve.shutdown()
        log.info("ended")
    return 0


def start_serve(config: ServeConfig) -> tuple[ServeConfig, bool]:
    """Start Ray Serve's proxies unless they run; return the settings with the actual port, and whether they
    were started. Raises OSError with a one-sentence message if the address is not available."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if serve.status().applications:
        return config, False
    with listen(config) as listener:
        config = replace(config, port=listener.getsockname()[1])
    serve.start(http_options={"host": config.host, "port": config.port}, logging_config=QUIET)
    return config, True


def deploy(app: serve.Application, is_new: bool) -> Any:
    """Deploy the application; return a handle of the ingress once all replicas are ready. Raises ValueError
    with a one-sentence message if they cannot start; Ray's own output is only in its logs."""
    try:
        with redirect_stdout(io.StringIO()) as discarded, redirect_stderr(discarded):
            return serve.run(app, name=APP, logging_config=QUIET)
    except RuntimeError:
        deployments = serve.status().applications[APP].deployments.values()
        reason = last_error("\n".join(each.message for each in deployments))
        if is_new:
            serve.delete(APP)
        raise ValueError(reason or "the replicas could not start; see Ray's logs.") from None


def wait_for_signal(handle: Any, stamp: str) -> bool:
    """Wait for Ctrl-C or SIGTERM (a second one ends the process), or until another command has deployed.
    Return whether there was a signal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            time.sleep(POLL)
            with suppress(Exception):  # raised by Ray if the ingress is not available at the moment
                if handle.stamp.remote().result(timeout_s=POLL) != stamp:
                    return False
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        return True
