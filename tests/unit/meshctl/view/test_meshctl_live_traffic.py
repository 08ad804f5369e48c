"""Lengths of live requests, from the metrics of frontends."""

from __future__ import annotations

from meshctl.view.live_traffic import Lengths, LiveSample, read_live_sample, sum_samples

TEXT = """
# TYPE f_input_sequence_tokens histogram
f_input_sequence_tokens_bucket{{le="100.0",model="m"}} {few}
f_input_sequence_tokens_bucket{{le="1000.0",model="m"}} {all}
f_input_sequence_tokens_bucket{{le="+Inf",model="m"}} {all}
f_input_sequence_tokens_count{{model="m"}} {all}
f_input_sequence_tokens_sum{{model="m"}} {tokens}
f_input_sequence_tokens_bucket{{le="+Inf",model="other"}} 99
f_input_sequence_tokens_sum{{model="other"}} 99
# TYPE f_cached_tokens histogram
f_cached_tokens_bucket{{le="+Inf",model="m"}} {all}
f_cached_tokens_sum{{model="m"}} 40
"""


def sample(few: int, all_: int, tokens: int) -> LiveSample:
    return read_live_sample(TEXT.format(few=few, all=all_, tokens=tokens), "m")


def test_the_requests_of_a_period_are_those_between_two_samples() -> None:
    period = sample(7, 30, 9000).since(sample(2, 10, 2000))
    found = period.to_json(5.0)
    assert found["prompts"] == {
        "buckets": [[0.0, 100.0, 5.0], [100.0, 1000.0, 15.0]],
        "total": 7000,
    }
    assert found["seconds"] == 5.0
    assert found["cached_tokens"] == 0.0


def test_a_frontend_that_restarted_counts_what_it_served_since() -> None:
    assert sample(1, 3, 500).since(sample(2, 10, 2000)).prompts.total == 500


def test_the_last_bucket_ends_at_twice_its_start() -> None:
    rows = Lengths({100.0: 0.0, float("inf"): 2.0}, 500.0).to_json()["buckets"]
    assert rows == [[100.0, 200.0, 2.0]]


def test_frontends_are_added() -> None:
    both = sum_samples([sample(2, 10, 2000), sample(1, 3, 500)])
    assert both.prompts.total == 2500
    assert both.prompts.count == 13
    assert sum_samples([]) == LiveSample()
    assert read_live_sample("", "m") == LiveSample()
