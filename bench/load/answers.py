"""What came back for one request: bytes as they arrived, each with its time, read when the load is over.

Needs nothing but the standard library. Server-sent events as OpenAI-compatible servers write them: each
`data:` line is one event, and has come when its last byte has.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

Json = dict[str, Any]
Piece = tuple[float, bytes]  # seconds, what was read then
DONE = "[DONE]"


def read_answer(pieces: list[Piece]) -> Json:
    """The row of an answer: `status`, `error` (None: a whole one), `text`, `chunks` (how many carried text),
    `first` and `last` (when the first and last of these came), `gap` (the longest wait between two), `end`,
    `prompt_tokens`, `tokens`."""
    status, body = split_response(pieces)
    row: Json = {"status": status, "error": None, "text": "", "chunks": 0, "prompt_tokens": 0, "tokens": 0}
    if status != 200:
        said = b"".join(data for _, data in body).decode(errors="replace")
        return {**row, "error": f"status {status}: {said[:200]}" if status else "no answer"}
    came, whole = [], False
    for when, data in events(body):
        if data == DONE:
            whole, row["end"] = True, when
            break
        event = json.loads(data)
        if "error" in event:
            return {**row, "error": f"in the stream: {event['error']}"[:200]}
        if text := text_of(event):
            came.append(when)
            row["text"] += text
        usage = event.get("usage") or {}
        row["prompt_tokens"] = usage.get("prompt_tokens", row["prompt_tokens"])
        row["tokens"] = usage.get("completion_tokens", row["tokens"])
    if not whole or not came or not row["tokens"]:
        return {**row, "error": "the stream ended early" if not whole else "no text, or no usage"}
    gap = max((b - a for a, b in pairwise(came)), default=0.0)
    return {**row, "chunks": len(came), "first": came[0], "last": came[-1], "gap": gap}


def text_of(event: Json) -> str:
    """What a chunk adds to the text of a chat or of a completion."""
    return "".join(
        choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        for choice in event.get("choices") or []
    )


def split_response(pieces: list[Piece]) -> tuple[int, list[Piece]]:
    """Status and body of an HTTP response, 0 if there is none. Of a body that is cut off, what there is."""
    raw = b"".join(data for _, data in pieces)
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        return 0, []
    status, *fields = head.decode("latin-1").split("\r\n")
    start = len(head) + len(found)
    chunked = any(field.lower().replace(" ", "") == "transfer-encoding:chunked" for field in fields)
    spans = chunk_spans(raw, start) if chunked else iter([(start, len(raw))])
    ends, total = [], 0
    for _, data in pieces:
        total += len(data)
        ends.append(total)
    body = []
    for begin, end in spans:  # cut where a piece ends, so that each part has its own time
        while begin < end:
            i = bisect_left(ends, begin + 1)
            body.append((pieces[i][0], raw[begin : min(end, ends[i])]))
            begin = min(end, ends[i])
    return int(status.split()[1]), body


def chunk_spans(raw: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of a body lie that is sent in chunks."""
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0], 16)
        if size == 0:
            return
        yield line + 2, min(line + 2 + size, len(raw))
        at = line + 2 + size + 2


def events(body: list[Piece]) -> Iterator[tuple[float, str]]:
    """When each event had come, and its data."""
    rest = b""
    for when, data in body:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip().decode()
