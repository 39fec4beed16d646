"""The routes of the server."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...llm import LLM
from ...text.validation import shown
from ..openai_format import CHAT, COMPLETIONS
from ..tasks import encode, parse_task
from . import anthropic_messages, openai_responses
from .answers import Answer, Format
from .anthropic_messages import COUNT_TOKENS, MESSAGES, AnthropicFormat
from .completions import OpenAIFormat
from .gate import Bodies, HTTPError, guarded
from .loop import EngineLoop
from .metrics import ServerMetrics
from .openai_responses import RESPONSES, ResponsesFormat
from .requests import bad_request, read_json, read_request
from .settings import ServeConfig

FORMATS: dict[str, tuple[type[Format], Any]] = {  # and translations to chat completions
    CHAT: (OpenAIFormat, None), COMPLETIONS: (OpenAIFormat, None),
    MESSAGES: (AnthropicFormat, anthropic_messages.translate),
    RESPONSES: (ResponsesFormat, openai_responses.translate),
}  # fmt: skip
READERS = 2  # threads that parse requests, since chat templates and tokenizers are slow
PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
PAGE_HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cache-control": "no-cache",
}  # fmt: skip


class App:
    """The routes. `responses` counts responses by path (that of a route, or "other") and status."""

    def __init__(self, llm: LLM, config: ServeConfig, model: str) -> None:
        self.llm, self.config, self.model = llm, config, model
        self.engine = EngineLoop(llm, llm.config.max_num_seqs + config.max_queue)
        llm.engine.history.requires_key = True  # requests without one may come from different clients
        self.responses: Counter[tuple[str, int]] = Counter()
        self.metrics = ServerMetrics(self.engine, model, self.responses)
        self.created = int(time.time())
        self._bodies = Bodies(config)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._files = {path.name: path for path in PAGE.iterdir()}

    def asgi(self) -> ASGIApp:
        """Return the ASGI app, wrapped in the gate."""
        posts: dict[str, Any] = dict.fromkeys(FORMATS, self.answer)
        posts[COUNT_TOKENS] = partial(self._read, self.count_tokens)
        posts["/tokenize"] = partial(self._read, self.tokenize)
        posts["/detokenize"] = partial(self._read, self.detokenize)
        gets = {"/": self.page, "/page/{name}": self.page, "/health": self.health}
        gets |= {"/metrics": self.show_metrics, "/v1/models": self.models}
        gets["/v1/models/{name:path}"] = self.models
        routes = [Route(path, function, methods=["POST"]) for path, function in posts.items()]
        routes += [Route(path, function) for path, function in gets.items()]
        handlers: Any = dict.fromkeys((HTTPException, Exception), _on_error)
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return guarded(app, self.config, self.responses, {route.path for route in routes})

    async def answer(self, request: Request) -> Any:
        """Handle a generation request of any API in `FORMATS`."""
        try:
            self.engine.check_capacity()
            format, translate = FORMATS[path := request.url.path]
            parse = partial(read_request, self.llm, path, translate=translate)
            parsed = await self._read(parse, request)
            salt = request.state.salt + parsed.salt
            salt = hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
            job = self.engine.submit(parsed.prompts, parsed.params, parsed.streams, salt)
        except asyncio.QueueFull:
            message = "The queue is full; try again in a second."
            raise HTTPError(429, message, headers={"retry-after": "1"}) from None
        except ValueError as error:
            raise HTTPError(400, str(error), "n") from None
        state = request.state
        answer = format(parsed, state.id, self.model, self.llm.tokenizer)
        return Answer(parsed, job, answer, self.config.request_timeout, state.log_fields)

    async def _read(self, parse: Callable[[dict[str, Any]], Any], request: Request) -> Any:
        """Return `parse` of the body, a JSON object for this model, in a reader thread."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPError(415, "Unsupported media type; send JSON with 'Content-Type: application/json'.")

        def read() -> Any:
            body = read_json(data)
            self._check_model(body.pop("model", None) or self.model)
            try:
                return parse(body)
            except (ValueError, TypeError) as error:
                raise bad_request(error, body) from None

        async with self._bodies.read(request) as data:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def _check_model(self, name: Any) -> None:
        if name != self.model:
            message = f"The model {shown(name)} does not exist. Available: {self.model!r}."
            raise HTTPError(404, message, "model", "model_not_found")

    def count_tokens(self, body: dict[str, Any]) -> Response:
        request = read_request(self.llm, MESSAGES, body, anthropic_messages.translate)
        return JSONResponse({"input_tokens": request.num_prompt_tokens})

    def tokenize(self, body: dict[str, Any]) -> Response:
        window = self.llm.engine.max_model_len
        ids = encode(parse_task(body, self.llm.default_params, raw=True), self.llm.tokenizer, window)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": window})

    def detokenize(self, body: dict[str, Any]) -> Response:
        tokens, size = body.get("tokens"), self.llm.engine.limits.vocab_size
        if not isinstance(tokens, list) or any(type(t) is not int or not 0 <= t < size for t in tokens):
            raise HTTPError(400, f"tokens must be a list of token ids from 0 to {size - 1}.", "tokens")
        text = self.llm.tokenizer.decode(tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def models(self, request: Request) -> Response:
        if (name := request.path_params.get("name")) is not None:
            self._check_model(name)
        engine, spec = self.llm.engine, self.llm.config.spec
        drafts = {"max_tokens": engine.worker.max_k, "tokens": spec.num_speculative_tokens}
        entry = {
            "id": self.model, "object": "model", "created": self.created, "owned_by": "nanospec",
            "max_model_len": engine.max_model_len, "structured_output": find_spec("llguidance") is not None,
            "speculation": {"method": spec.method, **drafts},
        }  # fmt: skip
        return JSONResponse(entry if name is not None else {"object": "list", "data": [entry]})

    async def health(self, request: Request) -> Response:
        alive = self.engine.is_alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    async def show_metrics(self, request: Request) -> Response:
        text, kind = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type=kind)

    async def page(self, request: Request) -> Response:
        if (path := self._files.get(request.path_params.get("name", "index.html"))) is None:
            raise HTTPError(404, "File not found.")
        return FileResponse(path, headers=PAGE_HEADERS)


async def _on_error(request: Request, error: Any) -> Response:
    """Return the response to an HTTPError, to Starlette's error for a path or method, or to another error."""
    if not isinstance(error, HTTPException):
        error = HTTPError(500, "Internal server error; see the server's log.")
    elif not isinstance(error, HTTPError):
        paths = ", ".join(sorted(route.path for route in request.app.routes if "{" not in route.path))
        message = f"Unknown path {shown(request.url.path)}; the server has {paths}."
        if error.status_code == 405:
            message = f"Method not allowed; use {(error.headers or {}).get('Allow', 'another')}."
        error = HTTPError(error.status_code, message, headers=error.headers)
    response: Response = error.response(request.scope)
    return response
