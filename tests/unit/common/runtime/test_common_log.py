"""Logs: one JSON line per event for any value, without blocking."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import structlog
from opentelemetry import trace

from common.runtime import log, telemetry

Start = Callable[..., log.LogWriter]
# A blocked writer never ends; on a busy machine a correct one only takes longer.
WAIT_S = 20.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def start(pipe: tuple[int, int]) -> Iterator[Start]:
    """Sets up logs on the pipe; restores structlog and logging at the end."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    started: list[log.LogWriter] = []

    def begin(*args: Any, **options: Any) -> log.LogWriter:
        started.append(log.setup(*args, fd=pipe[1], **options))
        return started[-1]

    yield begin
    for logs in started:
        logs.close()
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])


def lines(pipe: tuple[int, int], logs: log.LogWriter) -> list[dict[str, Any]]:
    assert logs.close()
    return [json.loads(line) for line in os.read(pipe[0], 1 << 16).splitlines()]


def test_a_line_has_time_level_identity_and_bound_variables(
    start: Start, pipe: tuple[int, int]
) -> None:
    logs = start("info", service="router", instance_id="7")
    with structlog.contextvars.bound_contextvars(request_id="r-1", model="m"):
        structlog.get_logger().info("done", took_s=0.5)
    structlog.get_logger().debug("not written")
    (line,) = lines(pipe, logs)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "done",
        "level": "info",
        "service": "router",
        "instance": "7",
        "request_id": "r-1",
        "model": "m",
        "took_s": 0.5,
    }


def test_a_line_inside_a_span_carries_its_ids(start: Start, pipe: tuple[int, int]) -> None:
    logs = start()
    parent = telemetry.context_from_traceparent(f"00-{'a' * 32}-{'b' * 16}-01")
    span = trace.get_current_span(parent)
    with trace.use_span(span):
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    inside, outside = lines(pipe, logs)
    assert (inside["trace_id"], inside["span_id"]) == ("a" * 32, "b" * 16)
    assert "trace_id" not in outside


def test_records_of_libraries_and_warnings_have_the_same_format(
    start: Start, pipe: tuple[int, int]
) -> None:
    logs = start("info")
    logging.getLogger("uvicorn.error").info("started on %s", "port 1")
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("odd").log(25, "between two levels")
    logging.getLogger("odd").log(60, "above all levels")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    got = lines(pipe, logs)
    assert [(line["logger"], line["level"]) for line in got] == [
        ("uvicorn.error", "info"),
        ("odd", "info"),
        ("odd", "critical"),
        ("py.warnings", "warning"),
    ]
    assert got[0]["event"] == "started on port 1"


def test_an_exception_is_one_line_with_its_traceback(start: Start, pipe: tuple[int, int]) -> None:
    logs = start()
    try:
        raise ValueError("because")
    except ValueError:
        structlog.get_logger().exception("failed")
        logging.getLogger("lib").exception("also")
    ours, theirs = lines(pipe, logs)
    assert "ValueError: because" in ours["exception"]
    assert "ValueError: because" in theirs["exception"]


@pytest.mark.parametrize(
    "value", [object(), 2**70, "\ud800", {1: 2}, float("nan"), b"\xff", {1, 2}, RuntimeError("x")]
)
def test_any_value_is_logged_as_one_json_line(
    start: Start, pipe: tuple[int, int], value: object
) -> None:
    logs = start()
    structlog.get_logger().info("odd", value=value)
    (line,) = lines(pipe, logs)
    assert line["event"] == "odd"
    assert "value" in line


class Key(NamedTuple):
    worker_id: int
    dp_rank: int


def test_integers_that_a_double_cannot_represent_are_written_as_text(
    start: Start, pipe: tuple[int, int]
) -> None:
    logs = start()
    worker_id = 2**63 - 1
    structlog.get_logger().info(
        "fleet_changed",
        joined=[worker_id, 5],
        source=Key(worker_id, 1),
        shrink={Key(worker_id, 1): 7},
        worker_id=worker_id,
        exact=2**53 - 1,
        below=-(2**53),
        rate=float("nan"),
    )
    (line,) = lines(pipe, logs)
    as_text = str(worker_id)
    assert (line["joined"], line["source"], line["worker_id"]) == (
        [as_text, 5],
        [as_text, 1],
        as_text,
    )
    (shrunk,) = line["shrink"].items()
    assert as_text in shrunk[0]
    assert shrunk[1] == 7
    assert (line["exact"], line["below"]) == (2**53 - 1, str(-(2**53)))
    assert line["rate"] is None, "like in every other line"


def test_console_lines_are_plain_text(start: Start, pipe: tuple[int, int]) -> None:
    logs = start("info", "console")
    structlog.get_logger().info("hello", n=1)
    assert logs.close()
    text = os.read(pipe[0], 4096).decode()
    assert "hello" in text
    assert "n=1" in text
    assert "\x1b" not in text


def test_a_stalled_reader_does_not_block_and_receives_the_number_of_dropped_lines() -> None:
    read_end, write_end = os.pipe()
    logs = log.LogWriter(write_end, lines_max=100)
    started = time.monotonic()
    for number in range(5000):
        logs.put(b'{"n": %d, "pad": "%s"}' % (number, b"x" * 4000))
    assert time.monotonic() - started < WAIT_S
    assert not logs.close(0.01), "the pipe is full and not read"
    got: list[dict[str, Any]] = []
    rest = b""
    os.set_blocking(read_end, False)
    deadline = time.monotonic() + WAIT_S
    while not any(line.get("event") == "log_lines_dropped" for line in got):
        assert time.monotonic() < deadline
        try:
            rest += os.read(read_end, 1 << 16)
        except BlockingIOError:
            continue
        *whole, rest = rest.split(b"\n")
        got += [json.loads(line) for line in whole]
    written = [line["n"] for line in got if "n" in line]
    assert written == sorted(written)
    assert 0 < sum(line.get("lines", 0) for line in got) <= 5000 - len(written)
    os.close(read_end)
    os.close(write_end)


def test_a_closed_stderr_does_not_raise() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    logs = log.LogWriter(write_end)
    for _ in range(1000):
        logs.put(b"x")
    assert logs.close()
    os.close(write_end)
