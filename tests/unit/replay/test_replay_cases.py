"""The cases of `make bench-replay` with conversations and latency targets."""

from __future__ import annotations

import pytest

from bench.replay_deadlines import INTERACTIVE_S, attainment, fair_shares, jain_index
from replay.mesh import MeshSettings, Outcome, ReplayMesh
from replay.policies import POLICIES
from replay.settings import parse_settings
from replay.trace import TraceRequest, with_sessions
from replay.workloads import generate


def test_a_prompt_that_begins_with_a_whole_earlier_one_is_its_next_turn() -> None:
    prompts = [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9), (1, 2, 3, 4, 5, 6), (1,), (1, 7)]
    requests = [TraceRequest(float(n), 512 * len(ids), 1, ids) for n, ids in enumerate(prompts)]
    assert [one.session for one in with_sessions(requests, 512)] == [1, 1, 2, 1, 3, 4]


@pytest.mark.slow
def test_names_restore_hits_where_bodies_pass_through() -> None:
    requests = generate("sessions", 120, 1)
    assert len({request.session for request in requests}) > 3
    hits = []
    for with_hints in (False, True):
        settings = MeshSettings(
            workers=4, routers=2, is_tokenized=False, with_hints=with_hints, has_indexer=False
        )
        outcomes = ReplayMesh(settings, POLICIES["kv"]).run(requests).outcomes
        hits.append(sum(outcome.cached_tokens for outcome in outcomes))
    assert hits[1] > 1.2 * hits[0]


def test_a_target_that_cannot_be_met_is_refused_by_the_replayed_router() -> None:
    rules = parse_settings(("queue_threshold=0.5",)).rules
    late = [TraceRequest(2.0 + n * 0.01, 8192, 2, ttft_target_s=1.5) for n in range(12)]
    first = TraceRequest(0.0, 8192, 2)
    outcomes = (
        ReplayMesh(MeshSettings(workers=1, rules=rules), POLICIES["kv"])
        .run([first, *late])
        .outcomes
    )
    assert outcomes[0].ttft_s is not None
    served = [one for one in outcomes[1:] if one.ttft_s is not None]
    assert {one.refusal for one in outcomes[1:] if one.ttft_s is None} == {"TARGET_UNMET"}
    assert 0 < len(served) < 4


def test_fair_shares_give_each_tenant_what_it_wants_or_an_equal_part() -> None:
    shares = fair_shares({"a": 100, "b": 10, "c": 50}, 90.0)
    assert shares == {"b": 10.0, "c": 40.0, "a": 40.0}
    assert jain_index({"a": 40.0, "b": 10.0, "c": 40.0}, shares) == pytest.approx(1.0)
    assert jain_index({"a": 90.0}, {"a": 30.0, "b": 30.0, "c": 30.0}) == pytest.approx(1 / 3)


def test_attainment_counts_all_requests() -> None:
    trace = [TraceRequest(0.0, 100, 1, tenant="a", ttft_target_s=INTERACTIVE_S) for _ in range(4)]
    outcomes = [
        Outcome(0.0, 100, 1, ttft_s=1.0),
        Outcome(0.0, 100, 1, ttft_s=INTERACTIVE_S + 1),
        Outcome(0.0, 100, 1, refusal="TARGET_UNMET"),
        Outcome(0.0, 100, 1),
    ]
    found = attainment(trace, outcomes)
    assert (found.all, found.interactive, found.refused, found.late) == (0.25, 0.25, 0.25, 0.5)
