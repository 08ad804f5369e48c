"""The chaos runner injects faults and detects missed limits; `make chaos` runs all cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos import gray
from tests.chaos.cases import DEATH_PAUSE_S, GRAY_CASES, Case, all_cases
from tests.chaos.client import Reply, content_of
from tests.chaos.drive import Observations, report, run_case
from tests.chaos.storm import storm
from tests.kit.oracle import Oracle

CASE = next(case for case in all_cases() if case.name == "agg/kill-decode")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def exact_reply(oracle: Oracle, prompt: str, *, begun_at: float, pause_s: float = 0.01) -> Reply:
    """Returns an exact stream."""
    expected = oracle.completion(prompt, CASE.tokens, ignore_eos=True)
    return Reply(
        prompt,
        CASE.tokens,
        begun_at=begun_at,
        ended_at=begun_at + 1.0,
        status=200,
        pause_s=pause_s,
        text=expected.text,
        finish_reason=expected.finish_reason,
    )


def missed_limits(oracle: Oracle, stream: Reply, case: Case = CASE, **more: object) -> list[str]:
    observations = Observations(
        streams=[stream], fresh=[exact_reply(oracle, "Fresh", begun_at=6.0)], fault_at=5.0
    )
    for name, value in more.items():
        setattr(observations, name, value)
    missed: list[str] = report(case, observations, oracle)["missed"]
    return missed


def test_an_exact_case_misses_no_limit(oracle: Oracle) -> None:
    assert missed_limits(oracle, exact_reply(oracle, "A stream", begun_at=4.0)) == []


def test_each_fault_misses_its_limit(oracle: Oracle) -> None:
    good = exact_reply(oracle, "A stream", begun_at=4.0)
    repeated = replace(good, text=good.text + good.text[-5:])
    assert missed_limits(oracle, replace(good, error="connection lost")) == ["errors"]
    assert missed_limits(oracle, repeated) == ["inexact"]
    assert missed_limits(oracle, replace(good, pause_s=DEATH_PAUSE_S + 0.1)) == ["longest_pause_ms"]
    assert missed_limits(oracle, good, fault_at=9.0) == ["recovery_s"]
    assert missed_limits(oracle, good, left="worker-1: 1 slots") == ["not freed: worker-1: 1 slots"]
    overload = replace(CASE, migrates=False)
    assert missed_limits(oracle, good, overload, migrations=1) == ["migrations"]


def test_an_incomplete_response_is_an_error() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert content_of(whole) == (200, "abcde")
    for cut in (head[:-2], whole[:-5], whole[:-8]):
        with pytest.raises(ValueError, match=r"ended|not found"):
            content_of(cut)


def test_a_gray_case_reports_errors_wrong_responses_hangs_and_the_way_back(oracle: Oracle) -> None:
    def reply(begun_at: float, **fields: Any) -> Reply:
        good = exact_reply(oracle, "A stream", begun_at=begun_at)
        return replace(good, first_at=begun_at + 0.2, last_at=begun_at + 0.9, **fields)

    run = gray.GrayRun(
        replies=[
            reply(99.0, error="before the fault"),
            reply(101.0, error="early"),
            reply(106.0, error="late"),
            reply(107.0, text="shortened"),
            reply(108.0, ended_at=115.0),
        ],
        fault_at=100.0,
        well_at=110.0,
        accepted_at=[99.5, 100.4, 103.0, 112.5, 113.0],
    )
    line = gray.report(GRAY_CASES[0], run, oracle)
    figures = ("requests", "errors", "errors_after_5s", "wrong", "longest_hang_s")
    assert tuple(line[name] for name in figures) == (4, 2, 1, 1, 6.1)
    assert (line["out_s"], line["back_s"]) == (3.0, 2.5)
    assert line["missed"] == ["errors_after_5s", "wrong"]
    assert gray.total([line, line]) == {
        "requests": 8,
        "error_share": 0.5,
        "errors_after_5s": 2,
        "wrong": 2,
        "longest_hang_s": 6.1,
    }


@pytest.mark.slow
def test_streams_survive_the_death_of_their_worker() -> None:
    line = run_case(replace(CASE, streams=16, pause_s=5.0))
    assert line["missed"] == [], line
    assert line["migrations"] > 0


@pytest.mark.slow
def test_no_request_fails_during_a_rolling_restart_of_every_service() -> None:
    rolling = next(case for case in all_cases() if case.name == "pd/rolling-restart")
    line = run_case(replace(rolling, streams=8, pause_s=None))
    assert line["missed"] == [], line
    assert line["requests"] > 8


@pytest.mark.slow
def test_a_small_storm_leaves_nothing_behind() -> None:
    line = storm("smoke", CASE.shape, 100, seed=1)
    assert (line["left"], line["calls_cut"]) == ({}, []), line
    assert line["controls"].get("different", 0) == 0
