"""`nanospec serve --replicas N`: the server as an application of Ray Serve.

    HTTP -> Ray's proxies -> Ingress (`front.py`) -> ServingEngine, N or MIN to MAX, each a whole server

Run again with other options on the same Ray, the command replaces the replicas one after the other: those
that go finish what they have begun. The command of before then ends, as what it has deployed is no more.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Scope

from ...config import EngineConfig, SpecConfig
from ..serve.app import App
from ..serve.logs import log, log_to
from ..serve.server import listen
from ..serve.settings import ServeConfig
from .front import LINGER, Front
from .messages import Sender
from .replica import Settings, load
from .router import ToReplica
from .routing import replicas
from .start import Share, ray_for

APP = "nanospec"
ROOM = 32  # requests beside those that compute or wait: for figures, models, tokens
TRIES = 2  # to start a replica
LOOK = 2.0  # seconds between looks at what is deployed
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


class ServingEngine:
    """One replica: the server of `serve/app.py` without its sockets."""

    def __init__(self, settings: Settings, config: ServeConfig, model: str) -> None:
        log_to(level="warning")  # the ingress says what was asked
        self._name = serve.get_replica_context().replica_id.unique_id
        seed = settings.options.get("seed", 0) ^ int(hashlib.sha256(self._name.encode()).hexdigest()[:7], 16)
        own = settings._replace(options={**settings.options, "seed": seed})  # unasked seeds are nobody else's
        self._app = App(load(own), config, model)
        self._sender, self._is_started = Sender(self._app.asgi()), False

    async def ask(self, scope: Scope, body: bytes, to: str | None = None) -> AsyncIterator[list[Message]]:
        """The answer to a request, as ASGI has it, and then what is to be logged. `to` is the router's."""
        if not self._is_started:  # here, as it is the event loop's
            self._is_started = True
            self._app.engine.start()
        scope["state"] = {}
        async with aclosing(self._sender.lists(scope, body)) as answer:
            async for messages in answer:
                yield messages
        yield [{"facts": {**scope["state"].get("facts", {}), "replica": self._name}}]

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        engine = self._app.engine
        if engine.end is not None or (self._is_started and not engine.is_alive):
            raise RuntimeError(engine.end or "the engine's steps fail one after the other")


class Ingress:
    """What the proxies pass requests to."""

    def __init__(self, engines: Any, config: ServeConfig, slack: int, level: str, stamp: str) -> None:
        log_to(level=level)
        self._stamp = stamp
        ask = engines.ask.options(stream=True)
        self._front = Front(config, slack, replicas, lambda *asked: ask.remote(*asked[:2], to=asked[2]))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._front.asgi()

    def stamp(self) -> str:
        """Tells the command that has deployed this from others."""
        return self._stamp

    async def drain(self) -> None:
        """As `Front.drain`."""
        await self._front.drain()


def application(
    settings: Settings,
    config: ServeConfig,
    model: str,
    share: Share,
    number: tuple[int, int],
    level: str,
    stamp: str,
) -> serve.Application:
    """What is deployed: an ingress, and as many engines as `number` (least, most) says."""
    rows = EngineConfig(spec=settings.spec, **settings.options).max_num_seqs
    most = rows + config.max_queue + ROOM
    engines = (
        serve.deployment(ServingEngine)
        .options(
            **scaling(number, rows),
            max_ongoing_requests=most,
            ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
            placement_group_bundles=[{"CPU": share.cpus, **({"GPU": share.gpus} if share.gpus else {})}],
            placement_group_strategy="STRICT_PACK",
            request_router_config={"request_router_class": ToReplica},
            graceful_shutdown_timeout_s=config.drain_timeout,
            max_constructor_retry_count=TRIES,
            logging_config=QUIET,
        )
        .bind(settings, config, model)
    )
    return (
        serve.deployment(serve.ingress()(Ingress))
        .options(
            max_ongoing_requests=config.max_connections,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=config.drain_timeout + LINGER,
            logging_config=QUIET,
        )
        .bind(engines, config, max(rows // 4, 1), level, stamp)
    )


def scaling(number: tuple[int, int], rows: int) -> dict[str, Any]:
    """How many engines: so many, or so many that each has as many requests as rows."""
    least, most = number
    if least == most:
        return {"num_replicas": least}
    bounds = {"min_replicas": least, "max_replicas": most, "initial_replicas": least}
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": rows}}


def run(
    config: ServeConfig,
    folder: Path,
    model: str,
    spec: SpecConfig,
    options: dict[str, Any],
    number: tuple[int, int],
    level: str,
) -> int:
    """Deploy, and wait until told to end, or replaced. Returns the exit status."""
    engine = EngineConfig(spec=spec, **options)
    name, stamp = config.served_model_name or folder.name, uuid.uuid4().hex
    how_many = {"replicas": ":".join(map(str, sorted(set(number))))}
    log.info("starting", extra={"facts": how_many})
    with redirect_stdout(sys.stderr), ray_for(number[1], engine, log_to_driver=True) as share:
        config, ours = start_serve(config)
        settings = Settings(str(folder.absolute()), model, spec, share.options(options), share.neighbours)
        app = application(settings, config, name, share, number, level, stamp)
        handle = deployed(app, ours)
        where = f"http://{config.host}:{config.port}"
        facts = {"page": f"{where}/", "api": f"{where}/v1", "model": name, "keys": len(config.api_key)}
        log.info("ready", extra={"facts": {**facts, **how_many}})
        if wait(lambda: current_stamp(handle) in (None, stamp)):
            with suppress(Exception):  # of Ray's: there is no ingress just now
                handle.drain.remote().result(timeout_s=config.drain_timeout + LINGER)
            if "RAY_ADDRESS" in os.environ:  # a Ray of our own ends anyway
                serve.delete(APP)
                if ours:
                    serve.shutdown()
        log.info("ended")
    return 0


def start_serve(config: ServeConfig) -> tuple[ServeConfig, bool]:
    """Have Ray Serve listen, unless it does already: the settings with the port, and whether it did not.
    OSError with a sentence if the address cannot be had."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if serve.status().applications:
        return config, False
    with listen(config) as listener:
        config = replace(config, port=listener.getsockname()[1])
    serve.start(http_options={"host": config.host, "port": config.port}, logging_config=QUIET)
    return config, True


def deployed(app: serve.Application, ours: bool) -> Any:
    """A handle of the ingress, when all replicas are there. ValueError with a sentence if they cannot be;
    what Ray prints of it is in its logs."""
    try:
        with redirect_stdout(io.StringIO()) as nowhere, redirect_stderr(nowhere):
            return serve.run(app, name=APP, logging_config=QUIET)
    except RuntimeError:
        found = serve.status().applications[APP].deployments.values()
        why = said("\n".join(each.message for each in found))
        if ours:
            serve.delete(APP)
        raise ValueError(why) from None


def current_stamp(handle: Any) -> str | None:
    """Of what is deployed now; None if nobody says so in time."""
    try:
        return str(handle.stamp.remote().result(timeout_s=LOOK))
    except Exception:  # of Ray's: it may be on its way from one to another
        return None


def wait(is_ours: Callable[[], bool]) -> bool:
    """Until told to end, by Ctrl-C or SIGTERM (a second one is not waited for): True. Or until another
    command has deployed: False."""
    told = threading.Event()

    def tell(*_: object) -> None:
        told.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tell)
    while not told.wait(LOOK):
        if not is_ours():
            return False
    return True


def said(text: str) -> str:
    """The sentence in what Ray says of a replica that could not start."""
    found = re.findall(r"(?:ValueError|OSError|TypeError|RuntimeError): (.+)", text)
    return found[-1] if found else "the replicas could not start; Ray's logs say why."
