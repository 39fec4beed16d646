"""A fake server for the page, with scripted answers. Each character of a prompt is one token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nanospec

PAGE = Path(nanospec.__file__).parent / "apps" / "serve" / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MODEL = {
    "id": "tiny",
    "object": "model",
    "created": 0,
    "owned_by": "nanospec",
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

    def send(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, data: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(data).encode(), "application/json", **headers)

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.send_json({"error": {"message": message}}, status, **headers)

    def is_allowed(self) -> bool:
        if not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self.refuse(401, "This server needs an API key.")
        return False

    def do_GET(self) -> None:
        name = "index.html" if self.path == "/" else self.path.removeprefix("/page/")
        if name in {file.name for file in PAGE.iterdir()}:
            file = PAGE / name
            self.send(200, file.read_bytes(), KINDS[file.suffix], Content_Security_Policy=POLICY)
        elif self.path != "/v1/models":
            self.refuse(404, f"There is no {self.path}.")
        elif self.is_allowed():
            self.send_json({"object": "list", "data": [self.server.model]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
            return self.refuse(status, message, **headers)
        self.send(200, b"", "text/event-stream")
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
    text = "".join(text for text, _ in pieces)
    accepted = sum(source != -1 for _, source in pieces)
    speculation = {"index": 0, "pieces": pieces, "drafted": drafted, "accepted": accepted, "drafter": "ngram"}
    if rejected:
        speculation["rejected"] = rejected
    return {
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
        "speculation": speculation,
    }


def end(tokens: int, steps: int, drafted: int, accepted: int, reason: str = "stop") -> list[dict[str, Any]]:
    """Return the last two chunks of an answer."""
    speculation = {
        "num_steps": steps,
        "num_drafted": drafted,
        "num_accepted": accepted,
        "tokens_per_step": tokens / steps,
        "acceptance_rate": accepted / max(drafted, 1),
        "by_drafter": {},
    }
    usage = {"completion_tokens": tokens, "total_tokens": tokens, "speculation": speculation}
    finish = {"index": 0, "delta": {}, "finish_reason": reason}
    return [{"choices": [finish]}, {"choices": [], "usage": usage}]
