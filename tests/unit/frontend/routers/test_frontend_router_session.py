"""Queries as messages of a Session."""

from __future__ import annotations

from common.request.preprocessed import RoutingHints
from frontend_svc.routers.session import query_to_proto
from kvmesh.router.v1 import router_pb2
from tests.kit.placements import placement_request


def sent(hints: RoutingHints | None) -> router_pb2.Query:
    query = placement_request(model="m", total_tokens=16, arrived_at=0.0, routing=hints)
    return query_to_proto(1, ("r", 0), query, 0).query


def test_hints_are_sent_unless_they_are_only_the_salt_that_the_hashes_contain() -> None:
    assert not sent(None).HasField("routing")
    assert not sent(RoutingHints()).HasField("routing")
    assert not sent(RoutingHints(cache_salt="s")).HasField("routing")
    hints = sent(RoutingHints(cache_salt="s", priority_jump=2.0)).routing
    assert (hints.cache_salt, hints.priority_jump) == ("s", 2.0)
