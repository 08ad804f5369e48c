"""What becomes of a line after a try, and how many lines are in flight."""

from __future__ import annotations

import orjson
import pytest

from batch_svc.core.pace import FALL_PAUSE_S, Pace
from batch_svc.core.results import Reply, Result, Retry, judge


def judged(
    status: int, body: bytes = b"{}", pause: float | None = None, failures: int = 0
) -> object:
    return judge("l1", "a", Reply(status, body, "r", pause), failures=failures, attempts_max=3)


def test_a_response_becomes_a_row_of_the_output_file() -> None:
    result = judged(200, b'{"object": "chat.completion"}')
    assert isinstance(result, Result)
    assert not result.is_error
    assert orjson.loads(result.row) == {
        "id": "l1",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "r",
            "body": {"object": "chat.completion"},
        },
        "error": None,
    }


def test_an_error_of_the_client_is_a_row_of_the_error_file_at_once() -> None:
    result = judged(400, b'{"error": {"message": "no"}}')
    assert isinstance(result, Result)
    assert result.is_error
    assert orjson.loads(result.row)["response"]["status_code"] == 400


def test_a_response_that_is_no_json_has_an_error_instead() -> None:
    result = judged(200, b"<html>")
    assert isinstance(result, Result)
    assert result.is_error
    row = orjson.loads(result.row)
    assert (row["response"], row["error"]["code"]) == (None, "invalid_response")


def test_a_response_that_is_nested_too_deeply_has_an_error_instead() -> None:
    result = judged(200, b"[" * 300 + b"]" * 300)
    assert isinstance(result, Result)
    assert result.is_error
    assert orjson.loads(result.row)["error"]["code"] == "invalid_response"


@pytest.mark.parametrize("status", [429, 503])
def test_a_line_waits_for_capacity_however_often_it_is_refused(status: int) -> None:
    assert judged(status, pause=2.5, failures=99) == Retry(2.5, is_busy=True)
    assert judged(status, pause=1e9) == Retry(30.0, is_busy=True)


@pytest.mark.parametrize("code", ["worker_lost", "not_migratable"])
def test_a_line_that_ends_its_workers_is_not_sent_for_ever(code: str) -> None:
    body = orjson.dumps({"error": {"message": "gone", "code": code}})
    assert judged(503, body) == Retry(1.0, is_busy=False)
    assert isinstance(judged(503, body, failures=2), Result)


def test_a_line_that_no_worker_had_in_time_waits_however_often() -> None:
    assert judged(504, pause=1.0, failures=99) == Retry(1.0, is_busy=True)


@pytest.mark.parametrize("status", [401, 404, 500, 502, 504])
def test_an_error_that_may_pass_is_tried_again_up_to_the_limit(status: int) -> None:
    assert [judged(status, failures=n) for n in range(2)] == [
        Retry(1.0, is_busy=False),
        Retry(2.0, is_busy=False),
    ]
    assert isinstance(judged(status, failures=2), Result)


def test_the_limit_of_lines_in_flight_falls_by_refusals_and_rises_by_successes() -> None:
    pace = Pace(64)
    pace.refused(0.0)
    pace.refused(FALL_PAUSE_S / 2)
    assert pace.limit == 32
    for n in range(1, 20):
        pace.refused(n * FALL_PAUSE_S)
    assert pace.limit == 4
    for _ in range(3_000):
        pace.succeeded()
    assert pace.limit == 64
    assert Pace(1).limit == 1
