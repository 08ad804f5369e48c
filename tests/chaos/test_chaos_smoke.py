"""That the chaos runner strikes, measures and judges; the cases themselves are `make chaos`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.cases import DEATH_PAUSE_S, Case, all_cases
from tests.chaos.client import Reply, content_of
from tests.chaos.drive import Observations, report, run_case
from tests.chaos.storm import storm
from tests.e2e.mesh import Oracle

CASE = next(case for case in all_cases() if case.name == "agg/kill-decode")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def answered(oracle: Oracle, prompt: str, *, begun_at: float, pause_s: float = 0.01) -> Reply:
    """A stream without a flaw."""
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


def judged(oracle: Oracle, stream: Reply, case: Case = CASE, **more: object) -> list[str]:
    observations = Observations(
        streams=[stream], fresh=[answered(oracle, "Fresh", begun_at=6.0)], fault_at=5.0
    )
    for name, value in more.items():
        setattr(observations, name, value)
    missed: list[str] = report(case, observations, oracle)["missed"]
    return missed


def test_a_case_without_a_flaw_misses_nothing(oracle: Oracle) -> None:
    assert judged(oracle, answered(oracle, "A stream", begun_at=4.0)) == []


def test_each_bar_is_missed_by_what_breaks_it(oracle: Oracle) -> None:
    good = answered(oracle, "A stream", begun_at=4.0)
    repeated = replace(good, text=good.text + good.text[-5:])
    assert judged(oracle, replace(good, error="it broke")) == ["errors"]
    assert judged(oracle, repeated) == ["inexact"]
    assert judged(oracle, replace(good, pause_s=DEATH_PAUSE_S + 0.1)) == ["longest_pause_ms"]
    assert judged(oracle, good, fault_at=9.0) == ["recovery_s"]
    assert judged(oracle, good, left="worker-1: 1 slots") == ["left behind: worker-1: 1 slots"]
    overload = replace(CASE, migrates=False)
    assert judged(oracle, good, overload, migrations=1) == ["migrations"]


def test_an_answer_that_was_cut_is_none() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert content_of(whole) == (200, "abcde")
    for cut in (head[:-2], whole[:-5], whole[:-8]):
        with pytest.raises(ValueError, match=r"ended|not found"):
            content_of(cut)


@pytest.mark.slow
def test_streams_survive_the_death_of_their_worker() -> None:
    line = run_case(replace(CASE, streams=16, pause_s=5.0))
    assert line["missed"] == [], line
    assert line["migrations"] > 0


@pytest.mark.slow
def test_a_rolling_restart_of_every_service_costs_no_client_an_error() -> None:
    rolling = next(case for case in all_cases() if case.name == "pd/rolling-restart")
    line = run_case(replace(rolling, streams=8, pause_s=None))
    assert line["missed"] == [], line
    assert line["requests"] > 8


@pytest.mark.slow
def test_a_small_storm_leaves_nothing_behind() -> None:
    line = storm("smoke", CASE.shape, 100, seed=1)
    assert (line["left"], line["calls_cut"]) == ({}, []), line
    assert line["controls"].get("different", 0) == 0
