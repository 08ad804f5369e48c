"""What the collector keeps of the mesh, and its bounds."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from common.api_keys import ApiKey, KeyDocument, Limits, Permission, Tenant
from common.inspection.members import FAILING, MemberState
from common.registry.instances import Instance, Snapshot, diff_snapshots
from common.service.routable.peers import Routable, WaitingPeer
from common.usage import UsageCounts, UsageKey
from console_svc.collect.history import History
from console_svc.collect.roster import EVENTS_MAX, MEMBER_POINTS, Roster, count_unhealthy
from console_svc.collect.scrape import read_scrape, sum_usage
from console_svc.collect.tenants import TenantShares, view_tenants
from kvmesh.types.v1 import load_pb2
from tests.kit.instances import snapshot_of, worker

NOW = 1000.0


def roster_of(*instances: Instance) -> Roster:
    roster = Roster("zone")
    roster.apply(diff_snapshots(Snapshot(), snapshot_of(*instances)), NOW)
    return roster


def frontend(id_: int, name: str) -> Instance:
    return Instance(id_, "mesh", "frontend", name, "127.0.0.1:1", http_address="127.0.0.1:2")


def test_members_are_sorted_by_service_role_and_number() -> None:
    roster = roster_of(
        worker(5, "decode", stable_name="decode-0"),
        worker(1, stable_name="worker-10"),
        worker(2, stable_name="worker-9", taints=frozenset({"zone=a", "x=b"})),
        frontend(3, "frontend-0"),
    )
    names = [member.name for member in roster.members]
    assert names == ["frontend-0", "worker-9", "worker-10", "decode-0"]
    assert roster.members[1].domain == "a"
    assert roster.members[0].url == "http://127.0.0.1:2"
    assert roster.members[0].role == ""


def test_a_response_updates_load_and_health_and_a_change_of_health_is_an_event() -> None:
    roster = roster_of(worker(1, stable_name="worker-0"))
    loads = (
        load_pb2.Load(running=2, waiting=1, kv_used_blocks=1, kv_total_blocks=8),
        load_pb2.Load(running=1, kv_used_blocks=1, kv_total_blocks=8, dp_rank=1),
    )
    peer = WaitingPeer(9, "router-0", "router", "no events")
    waiting = Routable(False, missing=(peer,))
    roster.responded(1, MemberState("serving", loads, routable=waiting), NOW)
    member = roster.members[0]
    assert (member.running, member.waiting, member.kv_use) == (3, 1, 0.125)
    assert member.missing == ("router router-0: no events",)
    assert roster.needs_routable(1)
    roster.responded(1, MemberState("serving", loads, routable=Routable(True)), NOW)
    assert not roster.needs_routable(1)
    roster.responded(1, MemberState(FAILING, loads, "probe"), NOW + 1)
    assert roster.events[0].text == "is failing: probe (was serving)"
    assert count_unhealthy(roster.members) == 1


def test_a_worker_that_dies_and_returns_has_events_and_no_memory_of_the_old_one() -> None:
    old, new = worker(1, stable_name="worker-0"), worker(2, stable_name="worker-0")
    roster = roster_of(old)
    roster.apply(diff_snapshots(snapshot_of(old), Snapshot(2)), NOW + 1)
    assert not roster.members
    roster.apply(diff_snapshots(Snapshot(2), snapshot_of(new)), NOW + 2)
    assert [event.kind for event in roster.events] == ["joined", "left", "joined"]
    assert roster.members[0].health == "unknown"


def test_a_changed_registration_keeps_the_responses() -> None:
    old = worker(1, stable_name="worker-0")
    new = replace(old, loras=frozenset({"l1"}))
    roster = roster_of(old)
    roster.responded(1, MemberState("serving", (load_pb2.Load(running=4),)), NOW)
    roster.apply(diff_snapshots(snapshot_of(old), snapshot_of(new)), NOW + 1)
    assert (roster.members[0].running, roster.members[0].adapters) == (4, ("l1",))
    assert roster.events[0].text == "loaded the adapter l1"


def test_members_are_asked_in_turn_and_once_an_interval() -> None:
    roster = roster_of(*(worker(n) for n in range(1, 6)))
    first = {i.id for i in roster.next_to_ask(3, 100.0, 2.0)}
    second = {i.id for i in roster.next_to_ask(3, 100.5, 2.0)}
    assert len(first) == 3
    assert first | second == {1, 2, 3, 4, 5}
    assert roster.next_to_ask(3, 101.0, 2.0) == []
    assert {i.id for i in roster.next_to_ask(9, 102.2, 2.0)} == first


def test_events_and_curves_are_bounded() -> None:
    roster = roster_of(worker(1))
    for number in range(EVENTS_MAX + MEMBER_POINTS):
        health = "serving" if number % 2 else "not_serving"
        roster.responded(1, MemberState(health, (load_pb2.Load(running=number),)), NOW + number)
    assert len(roster.events) == EVENTS_MAX
    curve = roster.curves("1")["running"]
    assert len(curve.times_s) == len(curve.values) == MEMBER_POINTS
    assert roster.curves("77")["running"].values == ()


def test_a_history_keeps_unknown_values_and_the_last_points() -> None:
    history = History(("a", "b"), 2)
    for at_s, value in ((1.0, 1.0), (2.0, None), (3.0, 2.5)):
        history.add(at_s, {"a": value})
    curves = history.curves()
    assert curves["a"].times_s == (2.0, 3.0)
    assert curves["a"].values == (None, 2.5)
    assert curves["b"].values == (None, None)


METRICS = """\
# HELP kvmesh_frontend_requests_total Requests
# TYPE kvmesh_frontend_requests_total counter
kvmesh_frontend_requests_total{model="m"} 7.0
# TYPE kvmesh_frontend_output_tokens_total counter
kvmesh_frontend_output_tokens_total{model="m"} 70.0
# TYPE kvmesh_frontend_inflight_requests gauge
kvmesh_frontend_inflight_requests{model="m"} 3.0
# TYPE kvmesh_frontend_queued_requests gauge
kvmesh_frontend_queued_requests{model="m"} 1.0
# TYPE kvmesh_frontend_time_to_first_token_seconds histogram
kvmesh_frontend_time_to_first_token_seconds_bucket{le="0.1",model="m"} 7.0
kvmesh_frontend_time_to_first_token_seconds_bucket{le="+Inf",model="m"} 7.0
kvmesh_frontend_time_to_first_token_seconds_count{model="m"} 7.0
kvmesh_frontend_time_to_first_token_seconds_sum{model="m"} 0.3
# TYPE kvmesh_frontend_usage_requests_total counter
kvmesh_frontend_usage_requests_total{tenant="t",key="k",model="m",adapter=""} 5.0
kvmesh_frontend_usage_requests_total{tenant="t",key="j",model="m",adapter=""} 2.0
# TYPE kvmesh_frontend_usage_output_tokens_total counter
kvmesh_frontend_usage_output_tokens_total{tenant="t",key="k",model="m",adapter="l"} 9.0
# TYPE kvmesh_frontend_usage_prompt_tokens_total counter
kvmesh_frontend_usage_prompt_tokens_total{tenant="t",key="k",model="m",adapter=""} 50.0
"""


def test_a_scrape_has_traffic_and_usage_by_tenant_and_model() -> None:
    scrape = read_scrape(METRICS, 5.0)
    sample = scrape.sample
    assert (sample.requests, sample.tokens, sample.inflight, sample.queued) == (7, 70, 3, 1)
    assert sample.ttft[0.1] == 7
    key = UsageKey("t", "k", "m", "")
    assert scrape.usage[key] == UsageCounts(requests=5, prompt_tokens=50)
    assert scrape.usage[key._replace(adapter="l")].output_tokens == 9.0
    both = sum_usage({"a": scrape, "b": scrape})
    assert both[key].requests == 10.0


def test_another_text_is_no_scrape() -> None:
    with pytest.raises(ValueError, match=r"."):
        read_scrape("kvmesh_frontend_requests_total{ 1", 5.0)


def test_tenants_have_limits_usage_and_shares_by_weight() -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    key = ApiKey(
        id="k1",
        sha256="0" * 64,
        scopes=frozenset({Permission.ADMIN}),
        created=created,
        expires=created,
    )
    document = KeyDocument(
        tenants={
            "a": Tenant(keys=(key,), limits=Limits(weight=3.0, concurrency=5)),
            "b": Tenant(),
        }
    )
    usage = {
        UsageKey("a", "k1", "m", ""): UsageCounts(prompt_tokens=40),
        UsageKey("a", "k2", "m", "l"): UsageCounts(prompt_tokens=20),
        UsageKey("b", "k3", "m", ""): UsageCounts(prompt_tokens=60),
    }
    seen = view_tenants(
        document, usage, {"a": 30.0, "b": 10.0}, can_revoke=True, now_s=created.timestamp() + 1
    )
    a, b = seen.tenants
    assert (a.recent_share, a.fair_share, a.concurrency) == (0.75, 0.75, 5)
    assert (b.recent_share, b.fair_share) == (0.25, 0.25)
    assert a.keys[0].is_expired
    assert a.usage is not None
    assert a.usage.prompt_tokens == a.by_model["m"].prompt_tokens == 60.0
    assert a.by_key["k1"].prompt_tokens == 40.0
    assert list(a.by_adapter) == ["l"]
    assert view_tenants(None, {}, {}, can_revoke=False, now_s=0.0).tenants == ()


def test_shares_are_those_of_the_last_minute() -> None:
    shares = TenantShares()
    for at_s, tokens in ((0.0, 100), (30.0, 150), (70.0, 170), (100.0, 190)):
        shares.add(at_s, {"f": {UsageKey("a", "k", "m", ""): UsageCounts(output_tokens=tokens)}})
    assert shares.recent() == {"a": 40.0}


def test_shares_count_nothing_twice_after_a_failed_scrape_or_a_restart() -> None:
    shares = TenantShares()
    of = {t: {UsageKey(t, "k", "m", ""): UsageCounts(output_tokens=5000)} for t in ("a", "b")}
    shares.add(0.0, {"f1": of["a"], "f2": of["b"]})
    shares.add(2.0, {"f1": of["a"]})
    shares.add(4.0, {"f1": of["a"], "f2": of["b"]})
    assert shares.recent() == {}
    shares.add(6.0, {"f1": {UsageKey("a", "k", "m", ""): UsageCounts(output_tokens=7)}})
    assert shares.recent() == {"a": 7.0}
