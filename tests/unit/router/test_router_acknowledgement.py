"""When a router acknowledges a member, and what it needs itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from common.registry.instances import Instance
from router_svc.acknowledgement import INDEX_WAIT_S, Acknowledgement
from router_svc.core.fleet import Fleet
from router_svc.core.overlap import IndexStatus
from router_svc.index_replica import IndexReplica
from tests.kit.instances import snapshot_of, worker

WORKER = worker(1, kv_index="events", dp_size=2)
INDEXER = replace(worker(2, model=""), service="indexer")


class StubIndex(IndexReplica):
    """An index replica in a state that the test sets."""

    def __init__(self, indexer_id: int | None, *states: str) -> None:
        self.indexer_id = indexer_id
        self.is_caught_up = indexer_id is not None
        self._states = states

    def index_status(self, placement: tuple[int, int], now: float) -> IndexStatus:
        return IndexStatus(self._states[placement[1]], "reason")


def acknowledgement(
    *members: Instance,
    index: StubIndex,
    follows_events: bool = True,
    clock: Callable[[], float] = lambda: 0.0,
) -> Acknowledgement:
    fleet = Fleet()
    fleet.update(snapshot_of(*members), 0.0)
    return Acknowledgement(fleet, index, clock, follows_events=follows_events)


@pytest.mark.parametrize("state", ["exact", "degraded"])
def test_a_worker_in_fleet_and_index_is_acknowledged(state: str) -> None:
    router = acknowledgement(WORKER, index=StubIndex(2, "exact", state))
    assert router.reason_against(1, False) == ""


@pytest.mark.parametrize("state", ["none", "gapped", "stale"])
def test_a_worker_of_which_one_rank_is_not_in_the_index_is_not_acknowledged(state: str) -> None:
    router = acknowledgement(WORKER, index=StubIndex(2, "exact", state))
    assert router.reason_against(1, False) == "its KV events are not in the index: reason"


def test_a_worker_that_stays_outside_the_index_is_acknowledged_after_a_limit() -> None:
    now = 5.0
    reason = "its KV events are not in the index: reason"
    router = acknowledgement(WORKER, index=StubIndex(2, "exact", "gapped"), clock=lambda: now)
    assert router.reason_against(1, False) == reason
    now += INDEX_WAIT_S - 0.1
    assert router.reason_against(1, False) == reason
    now += 0.1
    with capture_logs() as logs:
        assert router.reason_against(1, False) == ""
    assert [line["event"] for line in logs] == ["acknowledged_without_index"]
    assert router.reason_against(1, False) == reason, "a worker that joins again waits again"
    now += INDEX_WAIT_S - 0.1
    assert router.reason_against(1, True) != ""
    assert router.reason_against(1, False) == reason, "it has left meanwhile"
    now += 0.2
    assert router.reason_against(1, False) == reason


@pytest.mark.parametrize("case", ["no indexer", "no events followed", "no events published"])
def test_a_worker_without_an_index_to_be_in_is_acknowledged(case: str) -> None:
    member = replace(WORKER, kv_index="approx") if case == "no events published" else WORKER
    index = StubIndex(None if case == "no indexer" else 2, "none", "none")
    router = acknowledgement(member, index=index, follows_events=case != "no events followed")
    assert router.reason_against(1, False) == ""


def test_a_member_that_discovery_does_not_show_is_not_acknowledged_until_it_leaves() -> None:
    router = acknowledgement(index=StubIndex(None))
    assert router.reason_against(1, False) == "discovery does not show it to this router"
    assert router.reason_against(1, True) == ""
    router = acknowledgement(WORKER, index=StubIndex(None))
    assert router.reason_against(1, True) == "discovery still shows it to this router"


def test_an_indexer_is_acknowledged_and_needed_until_the_router_has_an_index() -> None:
    without, with_index = (
        acknowledgement(WORKER, INDEXER, index=StubIndex(indexer_id)) for indexer_id in (None, 2)
    )
    assert without.reason_against(2, False) == "the router follows no indexer"
    assert without.own_need(INDEXER) == "the router has not received the index"
    assert with_index.reason_against(2, False) == with_index.own_need(INDEXER) == ""
    assert without.own_need(WORKER) == ""


def test_a_router_is_about_to_have_the_index_while_it_follows_an_indexer() -> None:
    for indexer_id in (None, 2):
        index = StubIndex(indexer_id)
        index.is_caught_up = False
        router = acknowledgement(WORKER, INDEXER, index=index)
        assert router.own_need(INDEXER) == "the router has not received the index"
        assert router.is_in_progress(INDEXER) == (indexer_id is not None)
        assert not router.is_in_progress(WORKER)
