"""The load of servers that run already: which requests it counts."""

from __future__ import annotations

from worker_svc.engines.openai.load import CountedRequests, ServerLoad, read_sglang_loads


def counts(*polls: tuple[float, int], running: int = 4) -> list[int]:
    """Returns what the load counts after each poll: when it was measured, and the requests sent
    before the poll."""
    counted, found = CountedRequests(), []
    for measured_at, sent in polls:
        counted.record([ServerLoad(running=running, measured_at=measured_at)], {0: sent})
        found.append(counted.of(0))
    return found


def test_an_old_measurement_of_a_busy_rank_does_not_count_a_later_request() -> None:
    polls = [(1.0, 4), (1.0, 4), (2.0, 4), (2.0, 5), (2.0, 5), (2.0, 5), (3.0, 5)]
    assert counts(*polls) == [0, 0, 4, 4, 4, 4, 5]


def test_a_measurement_right_after_a_request_need_not_count_it() -> None:
    assert counts((1.0, 4), (1.0, 4), (2.0, 4), (3.0, 5), (4.0, 5), (5.0, 5)) == [0, 0, 4, 4, 4, 5]


def test_an_idle_rank_and_a_server_that_states_no_time_count_what_was_sent() -> None:
    assert counts((1.0, 3), (1.0, 5), running=0) == [3, 5]
    assert counts((0.0, 3), (0.0, 5)) == [3, 5]


def test_sglang_states_when_it_measured() -> None:
    row = {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 7}
    (load,) = read_sglang_loads({"loads": [row | {"timestamp": 5.5}]})
    assert (load.running, load.waiting, load.measured_at) == (2, 1, 5.5)
    (load,) = read_sglang_loads({"loads": [row]})
    assert load.measured_at == 0.0
