"""The routes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ... import __version__
from ...llm import LLM
from ...text.checks import shown
from .answers import Answer
from .errors import HTTPError, bad_request, draining
from .gate import Gate
from .jobs import QueueFull
from .logs import log
from .loop import EngineLoop
from .metrics import ServerMetrics
from .openai_format import CHAT, COMPLETIONS, conversation
from .requests import chat_prompt, read_json, read_request
from .sending import Answering
from .settings import ServeConfig

T = TypeVar("T")
READERS = 2  # threads that read requests: templates and tokenizers take their time
PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"


class App:
    """The server's answers.

    Attributes:
        draining: no new requests are taken.
        answered: requests by path, one of the routes or "other", and status.
    """

    def __init__(self, llm: LLM, config: ServeConfig, model: str) -> None:
        self.llm, self.config, self.model = llm, config, model
        self.engine = EngineLoop(llm, llm.config.max_num_seqs + config.max_queue)
        self.answered: Counter[tuple[str, int]] = Counter()
        self.metrics = ServerMetrics(self.engine, model, self.answered)
        self.draining = False
        self.created = int(time.time())
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._files = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}

    def asgi(self) -> ASGIApp:
        """All of it, behind the gate."""
        post = {
            CHAT: self.answer,
            COMPLETIONS: self.answer,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        get = {
            "/": self.page,
            "/page/{name}": self.page,
            "/health": self.health,
            "/metrics": self.show_metrics,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.models,
            "/version": self.version,
        }
        routes = [Route(path, _guarded(f), methods=["POST"]) for path, f in post.items()]
        routes += [Route(path, _guarded(f), methods=["GET"]) for path, f in get.items()]
        handlers: Any = {HTTPException: _not_found, Exception: _our_fault}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return Gate(app, self.config, self.answered, {*post, *get})

    def runs(self) -> dict[str, Any]:
        """How answers are computed."""
        spec = self.llm.config.spec
        return {**self.llm.engine.worker.runs(), "spec": spec.method, "k": spec.num_speculative_tokens}

    async def drain(self) -> None:
        """Take no new requests, and wait until those that run have ended, or their time is over."""
        self.draining, end = True, time.monotonic() + self.config.drain_timeout
        log.info(
            "finishing what runs; told again, ending at once",
            extra={"facts": {"running": self.engine.num_outputs}},
        )
        while self.engine.num_outputs and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.engine.end_all()

    async def answer(self, request: Request) -> Response:
        """Completions and chats."""
        self._check_room()
        body = await self._body(request)
        self._check_model(body)
        asked = await self._read(lambda: read_request(self.llm, self.config, request.url.path, body))
        self._check_room()  # again, as that took its time
        salt = request.state.salt + asked.salt
        salt = hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
        try:
            job = self.engine.submit(
                asked.prompts, asked.params, streams=asked.streams, salt=salt, arrival=request.state.arrival
            )
        except QueueFull as error:
            raise self._full(error) from None
        except ValueError as error:
            raise HTTPError(400, str(error), "n") from None
        answer = Answer(asked, job, request.state.id, self.model, self.llm.tokenizer.bytes_of)
        return Answering(self.config, answer, request.state.facts)

    def _check_room(self) -> None:
        """Raise HTTPError if nothing more is taken."""
        if self.draining:
            raise draining(self.config.drain_timeout)
        if self.engine.num_outputs >= self.engine.most:
            raise self._full(QueueFull(self.engine.seconds_left()))

    def _full(self, error: QueueFull) -> HTTPError:
        self.metrics.refused()
        return HTTPError(429, str(error), headers={"retry-after": str(error.seconds)})

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model") or self.model
        if model != self.model:
            message = f"There is no model {shown(model)} here; there is {self.model!r}."
            raise HTTPError(404, message, "model", "model_not_found")

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object that was sent, if it is not too large and comes in time."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPError(415, "The body must be JSON; send it with 'Content-Type: application/json'.")
        too_large = HTTPError(
            413, f"The body is larger than {self.config.max_body} bytes.", headers={"connection": "close"}
        )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.config.max_body:
            raise too_large
        data = bytearray()

        async def read() -> None:
            async for chunk in request.stream():
                data.extend(chunk)
                if len(data) > self.config.max_body:
                    raise too_large

        try:
            await asyncio.wait_for(read(), self.config.read_timeout)
        except asyncio.TimeoutError:
            raise HTTPError(408, "The body did not come in time.", headers={"connection": "close"}) from None
        return await self._read(lambda: read_json(bytes(data)))

    async def _read(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        _only(body, ("model", "prompt", "messages", "add_special_tokens", "chat_template_kwargs"))
        self._check_model(body)
        prompt, messages = body.get("prompt"), body.get("messages")
        special, options = body.get("add_special_tokens"), body.get("chat_template_kwargs") or {}
        if isinstance(prompt, str) == (messages is not None):
            raise HTTPError(400, "Give either 'prompt', a text, or 'messages', a list.", "prompt")
        if special not in (None, True, False):
            raise HTTPError(400, "add_special_tokens must be true or false.", "add_special_tokens")

        def read() -> Response:
            if isinstance(prompt, str):
                ids = self.llm.tokenizer.encode(prompt, special is not False)
            else:
                ids = chat_prompt(self.llm, conversation(messages), options)
            found = {"tokens": ids, "count": len(ids), "max_model_len": self.llm.engine.max_model_len}
            return JSONResponse(found)

        try:
            return await asyncio.to_thread(read)  # not one of the readers, whom answers wait for
        except ValueError as error:
            raise bad_request(error, body) from None

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        _only(body, ("model", "tokens"))
        self._check_model(body)
        tokens, size = body.get("tokens"), self.llm.engine.limits.vocab_size

        def read() -> Response:
            if not isinstance(tokens, list) or any(type(t) is not int or not 0 <= t < size for t in tokens):
                raise HTTPError(400, f"'tokens' must be a list of ids from 0 to {size - 1}.", "tokens")
            text = self.llm.tokenizer.decode(tokens, skip_special_tokens=False)
            return JSONResponse({"prompt": text})

        try:
            return await asyncio.to_thread(read)
        except ValueError as error:
            raise bad_request(error, body) from None

    async def models(self, request: Request) -> Response:
        spec, engine = self.llm.config.spec, self.llm.engine
        entry = {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "nanospec",
            "max_model_len": engine.max_model_len,
            "structured_output": find_spec("llguidance") is not None,
            "speculation": {
                "method": spec.method,
                "max_tokens": engine.worker.max_k,
                "tokens": spec.num_speculative_tokens,
            },
        }
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [entry]})
        self._check_model({"model": name})
        return JSONResponse(entry)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def health(self, request: Request) -> Response:
        status = "draining" if self.draining else "ok" if self.engine.is_alive else "failed"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        text, kind = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type=kind)

    async def page(self, request: Request) -> Response:
        path = self._files.get(request.path_params.get("name", "index.html"))
        if path is None:
            raise HTTPError(404, "There is no such file.")
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
        headers |= {"referrer-policy": "no-referrer", "x-frame-options": "DENY", "cache-control": "no-cache"}
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=headers)


def _guarded(function: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route whose HTTPErrors are answers."""

    async def route(request: Request) -> Response:
        try:
            return await function(request)
        except HTTPError as error:
            return error.response()
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it; the log does

    return route


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = "There is no such path; /v1/chat/completions and /v1/completions are there."
    if status == 405:
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "another method")
        message = f"{request.method} is not for this path; {allowed} is."
    return HTTPError(status, message, headers=getattr(error, "headers", None)).response()


async def _our_fault(request: Request, error: Exception) -> Response:
    return HTTPError(500, "The server failed on this request; its log says more.").response()


def _only(body: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := sorted(body.keys() - set(known)):
        raise HTTPError(400, f"unknown field {shown(unknown[0])}.", unknown[0], "unknown_field")
