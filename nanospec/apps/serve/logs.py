"""Log lines, one JSON object each. They never contain client text or API keys."""

from __future__ import annotations

import asyncio
import json
import logging
import time

log = logging.getLogger("nanospec.apps.serve")


class Lines(logging.Formatter):
    """Formats a record as JSON: time, level, event, and the fields of its `log_fields`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line |= {"event": record.getMessage(), **getattr(record, "log_fields", {})}
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, **error})


def log_to_stderr(level: str) -> None:
    """Send the log lines of the server, and uvicorn's warnings, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    cancelled = asyncio.CancelledError  # raised in requests by a shutdown
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], cancelled)))
    for name, minimum in (("nanospec.apps.serve", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(minimum)
