"""The server's log: a line per event, as text for people or as JSON for programs.

The variable OSTINATO_LOG: the level of all logs, or of single areas.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal, TextIO, get_args

from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.observe.request_record import RequestRecord

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
AccessLog = Literal["text", "json", "none"]


QUIET_PATHS = frozenset({"/", "/health", "/health/live", "/version", "/metrics", "/live", "/about", "/prefixes"})
"""Paths that are requested periodically. They are logged at level debug, unless they fail."""
PROBES = frozenset({"/health", "/health/live"})
"""Health paths, where status 503 is no failure of the request. The server logs its own state."""

VARIABLE = "OSTINATO_LOG"
AREAS = {
    "scheduler": "ostinato.scheduler",
    "cache": "ostinato.cache",
    "kernels": "ostinato.kernels",
    "graphs": "ostinato.graphs",
    "engine": "ostinato.engine",
    "serve": "ostinato.serve",
}
"""Area of the variable -> its logger."""
LEVELS = get_args(LogLevel)

_requests = logging.getLogger("ostinato.requests")
CONFIGURED = ("ostinato", "ostinato.requests", "uvicorn", "asyncio", *AREAS.values())
"""The loggers that `configure_logs` changes."""


def levels_in(text: str) -> dict[str, int]:
    """Return the level of each logger that a value of OSTINATO_LOG names.

    It is a list with commas of `LEVEL` (of all), `AREA` (at level debug) and `AREA=LEVEL`. ConfigError for others.
    """
    levels: dict[str, int] = {}
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        area, _, level = part.partition("=")
        if part in LEVELS:
            levels["ostinato"] = logging.getLevelName(part.upper())
        elif area in AREAS and (level in LEVELS or part == area):
            levels[AREAS[area]] = logging.getLevelName((level or "debug").upper())
        else:
            raise ConfigError(
                f"{VARIABLE}={text}: {part!r} is neither a level ({', '.join(LEVELS)}) nor an area "
                f"({', '.join(AREAS)}), which is at level debug, or as AREA=LEVEL at another"
            )
    return levels


def set_log_levels(environ: Mapping[str, str] = os.environ) -> None:
    """Give the loggers the levels of OSTINATO_LOG, which precede others. ConfigError for an unknown one.

    A process that writes its logs nowhere writes them to stderr then.
    """
    levels = levels_in(environ.get(VARIABLE, ""))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if levels and not logging.getLogger("ostinato").hasHandlers():
        logging.getLogger("ostinato").addHandler(_handler("text", None))


def configure_logs(
    form: LogFormat, level: LogLevel, stream: TextIO | None = None, access: AccessLog | None = None
) -> None:
    """Send the logs of this package and of the web server to `stream` (default: stderr), one line per event.

    `access` is the format of request lines, if it differs from `form`. OSTINATO_LOG precedes `level`; ConfigError if it
    is malformed.
    """
    handler = _handler(form, stream)
    _requests.handlers[:] = [] if access in (None, "none") else [_handler(access, stream)]
    _requests.propagate = access is None
    _requests.setLevel(logging.CRITICAL if access == "none" else logging.NOTSET)
    # The web server's ordinary events would only repeat the request lines.
    of_server = level if level in ("debug", "error") else "warning"
    for name, log_level in (("ostinato", level), ("uvicorn", of_server), ("asyncio", "warning")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(log_level.upper())
        logger.propagate = False
    set_log_levels()


@contextmanager
def logs_to(
    form: LogFormat, level: LogLevel, stream: TextIO | None = None, access: AccessLog | None = None
) -> Iterator[None]:
    """Call `configure_logs`, and restore all loggers at the end, so that the stream may be closed then."""
    loggers = [logging.getLogger(name) for name in CONFIGURED]
    saved = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    try:
        configure_logs(form, level, stream, access)
        yield
    finally:
        for logger, (handlers, propagates, of_logger) in zip(loggers, saved, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagates
            logger.setLevel(of_logger)


def _handler(form: str, stream: TextIO | None) -> logging.Handler:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _TextFormatter())
    return handler


def log_request(record: RequestRecord) -> None:
    """Log a request that has ended."""
    is_probe = record.path in PROBES and record.status == 503
    failed = record.status is None or (record.status >= 500 and not is_probe)
    quiet = is_probe or (record.status == 200 and (record.path in QUIET_PATHS or record.path.startswith("/page/")))
    level = logging.WARNING if failed else logging.DEBUG if quiet else logging.INFO
    if _requests.isEnabledFor(level):
        fields = request_fields(record)
        # `log` would search the stack for the caller, so the record is made directly.
        line = _requests.makeRecord(_requests.name, level, __file__, 0, _sentence(fields), (), None)
        line.fields = fields
        _requests.handle(line)


def request_fields(record: RequestRecord) -> JsonObject:
    """Return the fields of a request: counts in tokens, times in seconds since its arrival, without unknown fields."""
    figures = record.figures()
    fields = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "client": record.client,
        "bytes": record.sent_bytes,
        "key": record.key,
        "error": record.error,
        "code": record.code,
        "param": record.param,
        "prompt_tokens": figures.get("prompt_tokens"),
        "cached_tokens": figures.get("cached_tokens"),
        "completion_tokens": figures.get("completion_tokens"),
        "finish": figures.get("finish"),
        "queue_seconds": _since(record.begun, figures.get("scheduled")),
        "first_token_seconds": _since(record.begun, figures.get("first_token")),
        "total_seconds": _since(record.begun, record.ended),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _since(begun: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - begun, 6)


def _sentence(fields: dict[str, object]) -> str:
    head = f"{fields['method']} {fields['path']} {fields.get('status', '-')}"
    names = {
        "client": "from {}",
        "key": "key {}",
        "error": "{}",
        "code": "{}",
        "param": "param {}",
        "prompt_tokens": "prompt {}",
        "cached_tokens": "cached {}",
        "completion_tokens": "completion {}",
        "finish": "{}",
        "queue_seconds": "queue {:.3f} s",
        "first_token_seconds": "first token {:.3f} s",
        "total_seconds": "total {:.3f} s",
        "bytes": "{} bytes",
    }
    parts = [form.format(fields[name]) for name, form in names.items() if name in fields]
    return f"{head}  {', '.join(parts)}  {fields['request_id']}"


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}"
        trace = _trace(self, record)
        return f"{text}\n{trace}" if trace else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: JsonObject = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= fields if fields is not None else {"message": record.getMessage()}
        if trace := _trace(self, record):
            entry["exception"] = trace
        return json.dumps(entry)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """Return the traceback of a record's exception. The engine's process sends it as text."""
    return record.exc_text or (formatter.formatException(record.exc_info) if record.exc_info else None)
