"""Log lines, a JSON object each. Never a text of a client, nor a key."""

from __future__ import annotations

import asyncio
import json
import logging
import time

log = logging.getLogger("nanospec.apps.serve")


class Lines(logging.Formatter):
    """A line as JSON: time, level, event, and what the record has as `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line |= {"event": record.getMessage(), **getattr(record, "facts", {})}
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, **error})


def _is_news(record: logging.LogRecord) -> bool:  # not that the server's end has cancelled a request
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def log_to_stderr(level: str) -> None:
    """Have the server and uvicorn write their lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    handler.addFilter(_is_news)
    for name, least in (("nanospec.apps.serve", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
