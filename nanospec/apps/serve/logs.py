"""Log lines: a JSON object each, or on a terminal something to read. Never a text of a client, nor a key."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any, TextIO

log = logging.getLogger("nanospec.apps.serve")


class Structured(logging.Formatter):
    """A line as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
        }
        told |= {"event": record.getMessage(), **getattr(record, "facts", {})}
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class Readable(logging.Formatter):
    """A line to read."""

    def format(self, record: logging.LogRecord) -> str:
        facts = dict(getattr(record, "facts", {}))
        text = record.getMessage()
        if "status" in facts:
            text = f"{facts.pop('method')} {facts.pop('path')} {facts.pop('status')}"
        more = " ".join(f"{name}={value}" for name, value in facts.items())
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {text} {more}".rstrip()
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)  # a path may hold anything
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def is_news(record: logging.LogRecord) -> bool:
    """Not so if uvicorn tells of a request that was cancelled, as those are that outlast the server."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def log_to(stream: TextIO | None = None, level: str = "info") -> None:
    """Have the server and uvicorn write their lines to a stream (default: standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Readable() if handler.stream.isatty() else Structured())
    handler.addFilter(is_news)
    for name, least in (("nanospec.apps.serve", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
