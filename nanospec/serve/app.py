"""The routes."""

from __future__ import annotations

import asyncio
import hashlib
import time
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

from ..checks import as_token_id
from ..llm import LLM
from .answers import Answer
from .errors import HTTPError
from .gate import Gate
from .logs import log
from .loop import EngineLoop, QueueFull
from .metrics import ServerMetrics
from .openai_format import CHAT, COMPLETIONS
from .requests import chat_prompt, read_json, read_request
from .sending import Answering
from .settings import ServeConfig

T = TypeVar("T")
READERS = 2  # threads that read requests: templates and tokenizers take their time
PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
DRAINING = "The server is ending; running requests are finished, new ones are not taken."


class App:
    """The server's answers.

    Attributes:
        draining: no new requests are taken.
    """

    def __init__(self, llm: LLM, config: ServeConfig, model: str) -> None:
        self.llm, self.config, self.model = llm, config, model
        self.engine = EngineLoop(llm, llm.config.max_num_seqs + config.max_queue)
        self.metrics = ServerMetrics(self.engine, model)
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
        }
        routes = [Route(path, _guarded(f), methods=["POST"]) for path, f in post.items()]
        routes += [Route(path, _guarded(f), methods=["GET"]) for path, f in get.items()]
        handlers: Any = {HTTPException: _not_found, Exception: _our_fault}
        return Gate(Starlette(routes=routes, exception_handlers=handlers), self.config)

    async def drain(self) -> None:
        """Take no new requests, and wait until those that run have ended, or their time is over."""
        self.draining, end = True, time.monotonic() + self.config.drain_timeout
        log.info("draining", extra={"facts": {"running": self.engine.num_outputs}})
        while self.engine.num_outputs and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.engine.end_all()

    async def answer(self, request: Request) -> Response:
        """Completions and chats."""
        body = await self._body(request)
        if self.draining:
            headers = {"retry-after": str(int(self.config.drain_timeout) + 1), "connection": "close"}
            raise HTTPError(503, DRAINING, headers=headers)
        if body.get("model", self.model) != self.model:
            message = f"There is no model {str(body['model'])[:200]!r} here; there is {self.model!r}."
            raise HTTPError(404, message, "model", "model_not_found")
        asked = await self._read(lambda: read_request(self.llm, self.config, request.url.path, body))
        salt = request.state.salt + asked.salt
        salt = hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
        try:
            job = self.engine.submit(asked.prompts, asked.params, salt, asked.streams)
        except QueueFull as error:
            self.metrics.refused()
            raise HTTPError(429, str(error), headers={"retry-after": str(error.seconds)}) from None
        answer = Answer(asked, job, request.state.id, self.model)
        return Answering(self.config, answer, request.state.facts)

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
        _only(body, ("model", "prompt", "messages", "add_special_tokens"))
        prompt, messages = body.get("prompt"), body.get("messages")
        if isinstance(prompt, str) == isinstance(messages, list):
            raise HTTPError(400, "Give either 'prompt', a text, or 'messages', a list.", "prompt")
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise HTTPError(400, "add_special_tokens must be true or false.", "add_special_tokens")
        try:
            ids = await self._read(
                lambda: (
                    self.llm.tokenizer.encode(prompt, special)
                    if isinstance(prompt, str)
                    else chat_prompt(self.llm, messages or [], {})
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise HTTPError(400, str(error)) from None
        most = self.llm.engine.max_model_len
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": most})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        _only(body, ("model", "tokens"))
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or any(
            type(as_token_id(t)) is not int or not 0 <= t < 2**31 for t in tokens
        ):
            raise HTTPError(400, "'tokens' must be a list of token ids.", "tokens")
        return JSONResponse({"prompt": await self._read(lambda: self.llm.tokenizer.decode(tokens))})

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
        return JSONResponse({"object": "list", "data": [entry]})

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
    message = "There is no such path." if status == 404 else f"{request.method} is not for this path."
    return HTTPError(status, message).response()


async def _our_fault(request: Request, error: Exception) -> Response:
    return HTTPError(500, "The server failed on this request; its log says more.").response()


def _only(body: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := sorted(body.keys() - set(known)):
        raise HTTPError(400, f"unknown field {unknown[0]!r}.", unknown[0], "unknown_field")
