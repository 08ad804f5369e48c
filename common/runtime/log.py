"""Logs: one line per event on stderr, as JSON or for a console, with request and trace ids.

Logging does not block: a thread writes, and if it is too slow, lines are dropped and their number
is logged later. Logging does not raise for any value. Records of the standard library (uvicorn,
grpc, httpx) and Python warnings have the same format. Every line of a task has the variables bound
with `structlog.contextvars.bind_contextvars` (request_id, model, worker). In JSON, integers from
2^53 on, such as instance ids, are text.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import MutableMapping
from typing import Any, Literal

import orjson
import structlog
from opentelemetry import trace

QUEUE_LINES_MAX = 10_000
BATCH_LINES_MAX = 256  # Lines joined into one write.

_EXACT_INT_LIMIT = 2**53
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER  # Refuses larger integers.

# Their INFO records repeat our own lines.
_QUIET_LOGGERS = ("grpc", "httpcore", "httpx", "uvicorn.access", "asyncio")

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "console"]
LogEvent = MutableMapping[str, Any]


class LogWriter:
    """Writes lines in a thread of its own. Close it last."""

    def __init__(self, fd: int, lines_max: int = QUEUE_LINES_MAX) -> None:
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(lines_max)
        self._dropped = 0
        self._dropped_lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queues one line without newline; drops and counts it if the queue is full."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._count_dropped(1)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Writes queued lines; False if that takes longer than `timeout_s`. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._lines.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write(self) -> None:
        is_open = True
        while is_open:
            batch = [self._lines.get()]
            while len(batch) < BATCH_LINES_MAX and not self._lines.empty():
                batch.append(self._lines.get())
            is_open = None not in batch
            self._write_all([line for line in batch if line is not None])

    def _write_all(self, batch: list[bytes]) -> None:
        with self._dropped_lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            batch.append(orjson.dumps({"event": "log_lines_dropped", "lines": dropped}))
        data = b"".join(line + b"\n" for line in batch)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            # The reader of stderr is gone; only the count can be reported.
            self._count_dropped(len(batch))

    def _count_dropped(self, lines: int) -> None:
        with self._dropped_lock:
            self._dropped += lines


def setup(
    level: Level = "info",
    fmt: Format = "json",
    *,
    service: str = "",
    instance_id: str = "",
    stable_name: str = "",
    fd: int | None = None,
) -> LogWriter:
    """Configures structlog and logging, replacing any earlier setup. fd: None is stderr."""
    logs = LogWriter(sys.stderr.fileno() if fd is None else fd)
    level_number = logging.getLevelNamesMapping()[level.upper()]
    renderers: list[structlog.typing.Processor] = [structlog.processors.format_exc_info, _to_json]
    if fmt == "console":
        plain = structlog.dev.plain_traceback
        renderers = [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=plain)]
    names = {"service": service, "instance": instance_id, "name": stable_name}
    identity = {key: value for key, value in names.items() if value}

    def add_identity(_logger: object, _method: str, event: LogEvent) -> LogEvent:
        for key, value in identity.items():
            event.setdefault(key, value)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_identity,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_trace_ids,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level_number),
        logger_factory=lambda *_args: _LineLogger(logs),
        cache_logger_on_first_use=False,
    )
    _redirect_stdlib_logging(level_number)
    return logs


def _to_json(_logger: object, _method: str, event: LogEvent) -> bytes:
    try:
        return orjson.dumps(dict(event), default=str, option=_JSON_OPTIONS)
    except (TypeError, ValueError):
        # Large integers, and lone surrogates, which the standard library escapes.
        return json.dumps(_with_large_ints_as_text(dict(event)), default=str).encode()


def _with_large_ints_as_text(value: object) -> object:
    """Returns the same value, with text for integers that a double cannot represent."""
    match value:
        case int() if abs(value) >= _EXACT_INT_LIMIT:
            return str(value)
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {str(key): _with_large_ints_as_text(item) for key, item in value.items()}
        case list() | tuple():
            return [_with_large_ints_as_text(item) for item in value]
    return value


def _add_trace_ids(_logger: object, _method: str, event: LogEvent) -> LogEvent:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


class _LineLogger:
    """The logger that structlog calls with rendered lines of every level."""

    def __init__(self, logs: LogWriter) -> None:
        self._logs = logs

    def msg(self, line: str | bytes) -> None:
        self._logs.put(line if isinstance(line, bytes) else line.encode(errors="replace"))

    debug = info = warning = error = critical = log = msg


class _StdlibLogHandler(logging.Handler):
    """Logs a record of the standard library as an event."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            structlog.get_logger().log(
                # structlog supports the five named levels only; others map to the next lower one.
                min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL),
                record.getMessage(),
                logger=record.name,
                **({"exc_info": record.exc_info} if record.exc_info else {}),
            )
        except Exception:
            # A bad format string in a library's log call must not raise there.
            self.handleError(record)


def _redirect_stdlib_logging(level: int) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_StdlibLogHandler()]
    root.setLevel(level)
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.captureWarnings(True)
