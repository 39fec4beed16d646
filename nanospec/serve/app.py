"""The routes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..checks import as_token_id
from ..llm import LLM
from .answers import Answer, event
from .errors import HTTPError
from .gate import Gate
from .logs import log
from .loop import EngineFailed, EngineLoop, QueueFull, TooSlow
from .metrics import ServerMetrics
from .openai_format import CHAT, COMPLETIONS
from .requests import chat_prompt, read_json, read_request
from .settings import ServeConfig

T = TypeVar("T")
READERS = 2  # threads that read requests: templates and tokenizers take their time
LOOK = 5.0  # seconds between looks at whether a client still reads
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


class Answering(Response):
    """An answer under way. When its client goes away, or leaves unread what was sent, its outputs end."""

    def __init__(self, config: ServeConfig, answer: Answer, facts: dict[str, Any]) -> None:
        self.config, self.answer, self.facts = config, answer, facts
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sending_since: float | None = None
        write = self._stream if self.answer.asked.streams else self._whole
        sending = asyncio.ensure_future(write(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            why = await self._watch(sending, gone)
            if why is not None:
                self.facts["ended_by"] = why
                scope["state"].get("abort", lambda: None)()
        finally:
            self.answer.job.abort()
            for task in (sending, gone):
                task.cancel()
            self._tell()

    async def _watch(self, sending: asyncio.Future[None], gone: asyncio.Future[None]) -> str | None:
        """Wait for the answer to have been sent; why not, if it is not to be."""
        end, most = time.monotonic() + self.config.request_timeout, min(LOOK, self.config.write_timeout)
        while not sending.done():
            left = max(min(end - time.monotonic(), most), 0.0)
            await asyncio.wait({sending, gone}, timeout=left, return_when="FIRST_COMPLETED")
            now, since = time.monotonic(), self._sending_since
            if gone.done() and not sending.done():
                return "client gone"
            if since is not None and now - since > self.config.write_timeout:
                return "client does not read"
            if now > end:
                self.answer.job.put(TooSlow())
                end = float("inf")
        sending.result()
        return None

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self.answer.whole()
            error = self.answer.error
            response = HTTPError(500, error).response() if error else JSONResponse(body)
        except EngineFailed as failure:
            response = HTTPError(failure.status, str(failure)).response()
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(data: bytes, more_body: bool = True) -> None:
            self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more_body})
            self._sending_since = None

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        failure: HTTPError | None = None
        try:
            async for data in self.answer.events():
                await body(data)
            if self.answer.error:
                failure = HTTPError(500, self.answer.error)
        except EngineFailed as error:
            failure = HTTPError(error.status, str(error))
        if failure:
            await body(event(failure.body()))
        await body(b"", more_body=False)

    def _tell(self) -> None:
        """For the log: what was asked and given; never a text."""
        done = self.answer.done
        self.facts["prompt_tokens"] = self.answer.asked.num_prompt_tokens
        if done:
            usage = self.answer.usage()
            self.facts["completion_tokens"] = usage["completion_tokens"]
            self.facts["tokens_per_step"] = round(usage["speculation"]["tokens_per_step"], 2)
            self.facts["first_token_ms"] = round(min(each.first_token_seconds for each in done) * 1e3, 1)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
