"""A fake server for the page, with scripted answers. Each character of a prompt is one token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import guess_type
from typing import Any

from nanospec.apps.serve.app import PAGE, PAGE_HEADERS

MODEL = {
    "id": "tiny",
    "max_model_len": 2048,
    "speculation": {"method": "ngram", "max_tokens": 4, "tokens": "auto"},
    "structured_output": True,
}


class Fake(ThreadingHTTPServer):
    """Answers the nth chat request with the nth of `answers`: chunks, or (status, headers, error).

    An event among the chunks is waited for. `gone` is set when a client disconnects during its answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.answers: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.model: dict[str, Any] = MODEL
        self.key = ""
        self.gone = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, body: bytes, kind: str, status: int = 200, headers: Any = ()) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, data: Any, status: int = 200, headers: Any = ()) -> None:
        self.send(json.dumps(data).encode(), "application/json", status, headers)

    def is_allowed(self) -> bool:
        if not self.server.key or self.headers.get("authorization") == f"Bearer {self.server.key}":
            return True
        self.send_json({"error": {"message": "This server needs an API key."}}, 401)
        return False

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            file = PAGE / (self.path.removeprefix("/page/") if self.path != "/" else "index.html")
            self.send(file.read_bytes(), guess_type(file)[0] or "", headers=PAGE_HEADERS)
        elif self.is_allowed():
            self.send_json({"object": "list", "data": [self.server.model]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.is_allowed():
            return
        if self.path == "/tokenize":
            tokens = [ord(c) for c in prompt_of(body["messages"])]
            self.send_json({"tokens": tokens, "count": len(tokens), "max_model_len": 2048})
        elif self.path == "/detokenize":
            self.send_json({"prompt": "".join(map(chr, body["tokens"]))})
        else:
            self.server.requests.append(body)
            self.answer(self.server.answers[len(self.server.requests) - 1], len(prompt_of(body["messages"])))

    def answer(self, answer: Any, prompt_tokens: int) -> None:
        if isinstance(answer, tuple):
            status, headers, message = answer
            return self.send_json({"error": {"message": message}}, status, headers)
        self.send(b"", "text/event-stream")
        try:
            for line in events(answer, prompt_tokens):
                self.wfile.write(line.encode())
                self.wfile.flush()
        except OSError:
            self.server.gone.set()


def prompt_of(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def events(answer: list[Any], prompt_tokens: int) -> Iterator[str]:
    for item in answer:
        if isinstance(item, threading.Event):
            while not item.wait(0.02):
                yield ": still here\n\n"  # fails if the client has disconnected
        elif item == "broken off":
            return
        else:
            if "usage" in item:
                item = {**item, "usage": {"prompt_tokens": prompt_tokens, **item["usage"]}}
            yield f"data: {json.dumps(item)}\n\n"
    yield "data: [DONE]\n\n"


def step(*pieces: tuple[str, int], drafted: int = 0, rejected: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the chunk of one step; a piece is a token's text and its source, as in `outputs.Piece`."""
    choice = {"index": 0, "delta": {"content": "".join(text for text, _ in pieces)}, "finish_reason": None}
    accepted = sum(source != -1 for _, source in pieces)
    speculation = {"index": 0, "pieces": pieces, "drafted": drafted, "accepted": accepted, "drafter": "ngram"}
    return {"choices": [choice], "speculation": {**speculation, "rejected": rejected}}


def end(tokens: int, steps: int, drafted: int, accepted: int, reason: str = "stop") -> list[dict[str, Any]]:
    """Return the last two chunks of an answer."""
    counts = {"num_steps": steps, "num_drafted": drafted, "num_accepted": accepted}
    rates = {"tokens_per_step": tokens / steps, "acceptance_rate": accepted / max(drafted, 1)}
    usage = {"completion_tokens": tokens, "total_tokens": tokens, "speculation": {**counts, **rates}}
    finish = {"index": 0, "delta": {}, "finish_reason": reason}
    return [{"choices": [finish]}, {"choices": [], "usage": usage}]
