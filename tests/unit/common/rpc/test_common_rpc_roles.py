"""The roles that may call a method."""

from __future__ import annotations

import pytest

from common.errors import PermissionDenied
from common.rpc import roles
from kvmesh.batch.v1 import batch_pb2, conversations_pb2, responses_pb2
from kvmesh.engine.v1 import admin_pb2, engine_pb2
from kvmesh.frontend.v1 import frontend_pb2
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.member.v1 import member_pb2
from kvmesh.router.v1 import router_pb2

METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in (
        *(admin_pb2, batch_pb2, engine_pb2, frontend_pb2, indexer_pb2, responses_pb2),
        *(conversations_pb2, router_pb2),
    )
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
SERVICES = ("frontend", "router", "indexer", "worker", "batch")


def may_call(method: str, *names: str) -> bool:
    try:
        roles.check_caller(method, names, "mesh.test")
    except PermissionDenied:
        return False
    return True


def test_every_method_has_one_role_of_a_service_at_most_and_operators_call_all() -> None:
    for method in METHODS:
        assert may_call(method, "operator.mesh.test")
        assert sum(may_call(method, f"{role}.mesh.test") for role in SERVICES) <= 1
    assert set(roles._CALLER) <= METHODS, "a method that does not exist"


@pytest.mark.parametrize(
    ("method", "role"),
    [
        ("engine.v1.EngineService/Attach", "frontend"),
        ("indexer.v1.IndexerService/Publish", "worker"),
        ("indexer.v1.IndexerService/Subscribe", "router"),
        ("router.v1.RouterService/Session", "frontend"),
        ("router.v1.RouterService/Sync", "router"),
        ("engine.v1.EngineService/ListKvBlocks", "indexer"),
    ],
)
def test_a_stream_between_services_is_open_to_one_role(method: str, role: str) -> None:
    callers = {one for one in SERVICES if may_call(f"/kvmesh.{method}", f"{one}.mesh.test")}
    assert callers == {role}


def test_each_member_that_waits_for_peers_may_call_them_and_operators_read_its_state() -> None:
    methods = member_pb2.DESCRIPTOR.services_by_name["MemberService"].methods
    callers = {
        method.name: {
            role
            for role in (*SERVICES, "operator")
            if may_call(f"/kvmesh.member.v1.MemberService/{method.name}", f"{role}.mesh.test")
        }
        for method in methods
    }
    assert callers == {
        "Acknowledge": {"indexer", "router", "worker", "operator"},
        "GetRoutable": {"operator"},
    }
    for_operators = {
        method.name
        for method in methods
        if roles.is_for_operators(f"/kvmesh.member.v1.MemberService/{method.name}")
    }
    assert for_operators == {"GetRoutable"}


def test_names_of_other_domains_and_similar_names_are_no_role() -> None:
    method = "/kvmesh.router.v1.RouterService/Session"
    for name in ("frontend", "frontend.mesh.testing", "x.frontend.mesh.test", "*.mesh.test"):
        assert not may_call(method, name)
    assert may_call(method, "node7.example", "frontend.mesh.test")
