"""Logs as lines of JSON (``serve --log-json``), for programs that collect them."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """A record as one line: ``time`` (UTC), ``level``, ``logger``, ``message``, and what its ``extra`` has under ``fields``. An
    exception is named by its type alone, because its text may hold a prompt."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Let all loggers of this process write so to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
