"""The reason why a service did not start, from its log."""

from __future__ import annotations

import json

import pytest

from meshctl.process.failure_reason import reason

FAILED = {"event": "start_failed", "service": "worker", "level": "error"}
DRAINING = json.dumps({"event": "draining", "why": "start failed"})
STOPPED = json.dumps({"event": "stopped", "why": "start failed", "status": 1})


def test_the_reason_of_an_invalid_configuration_lists_every_problem() -> None:
    lines = [
        "worker: the configuration cannot be used:",
        "  KVMESH_WORKER_FOO: no such variable",
        "  --block-size: must be at least 1",
    ]
    assert reason(["something before", *lines]) == lines


def test_the_reason_of_a_failed_start_is_its_error_despite_later_log_lines() -> None:
    failed = json.dumps({**FAILED, "error": "cannot bind 127.0.0.1:80: Permission denied"})
    assert reason(['{"event": "loading"}', failed, DRAINING, STOPPED]) == [
        "cannot bind 127.0.0.1:80: Permission denied"
    ]


def test_the_reason_of_an_exception_is_the_last_line_of_its_traceback() -> None:
    trace = "Traceback (most recent call last):\n  File x, line 1\nKeyError: 'block'"
    assert reason([json.dumps({**FAILED, "exception": trace}), STOPPED]) == ["KeyError: 'block'"]


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("error='no such model'", "no such model"),
        ('error="it\'s gone"', "it's gone"),
        ("error=gone", "gone"),
    ],
)
def test_the_console_log_gives_the_same_reason(field: str, why: str) -> None:
    line = f"2026-01-01T00:00:00Z [error    ] start_failed   {field} instance=7 service=worker"
    stopped = "2026-01-01T00:00:00Z [info     ] stopped        service=worker why='start failed'"
    assert reason([line, stopped]) == [why]


def test_a_traceback_in_a_console_log_gives_its_last_line() -> None:
    line = "2026-01-01T00:00:00Z [error    ] start_failed   instance=7 service=worker"
    stopped = "2026-01-01T00:00:00Z [info     ] stopped        service=worker why='start failed'"
    assert reason([line, "Traceback:", "KeyError: 'block'", stopped]) == ["KeyError: 'block'"]


def test_without_a_known_line_the_last_plain_line_is_the_reason() -> None:
    lines = ["Traceback (most recent call last):", "ImportError: no grpc", "", STOPPED]
    assert reason(lines) == ["ImportError: no grpc"]


AWAITED = json.dumps({"event": "registry_awaited", "error": "cannot reach Consul", "for_s": 30.0})
AWAITED_ON_CONSOLE = (
    "2026-01-01T00:00:00Z [warning  ] registry_awaited   error='cannot reach Consul' for_s=30.0"
)
LOST = json.dumps({"event": "registry_lost", "error": "something else"})
ANSWERED = json.dumps({"event": "registry_answered"})
ANSWERED_ON_CONSOLE = "2026-01-01T00:00:01Z [info     ] registry_answered   service=worker"


@pytest.mark.parametrize("awaited", [AWAITED, AWAITED_ON_CONSOLE])
def test_waiting_for_the_registry_is_the_reason_despite_later_log_lines(
    awaited: str,
) -> None:
    assert reason(["loading weights", awaited, LOST]) == ["cannot reach Consul"]


@pytest.mark.parametrize("answered", [ANSWERED, ANSWERED_ON_CONSOLE])
def test_a_registry_that_has_responded_is_not_the_reason(answered: str) -> None:
    assert reason([AWAITED, answered, STOPPED]) == []
    assert reason([AWAITED, answered, "Killed"]) == ["Killed"]


def test_a_failed_start_or_a_traceback_takes_precedence_over_an_awaited_registry() -> None:
    failed = json.dumps({**FAILED, "error": "no such model"})
    assert reason([failed, AWAITED]) == ["no such model"]
    assert reason([AWAITED, "ImportError: no grpc"]) == ["ImportError: no grpc"]


@pytest.mark.parametrize(
    "lines",
    [[], [STOPPED], ['{"event": "start_failed"}'], ['{"event": "start_failed", "exception": 3}']],
)
def test_a_log_without_a_reason_gives_none(lines: list[str]) -> None:
    assert reason(lines) == []
