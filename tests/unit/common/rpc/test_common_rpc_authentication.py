"""Which callers the token of operators admits, by method and by host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import PermissionDenied, Unauthenticated
from common.rpc.authentication import CallerCheck
from common.runtime.member_key import MemberKeys

ROUTER = "/kvmesh.router.v1.RouterService/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# Any: grpc's context, of which the check reads the peer.
REMOTE: Any = SimpleNamespace(peer=lambda: "ipv4:10.0.0.7:5")


def check(method: str, token: str, *, operator_token: str | None = "operators") -> int | None:
    """Returns the id that the caller has proved."""
    callers = CallerCheck(
        token="mesh",
        admin_token=None,
        operator_token=operator_token,
        role_domain=None,
        members=MemberKeys(is_required=True),
        addresses=("here:1",),
    )
    return callers.check(method, {"authorization": f"Bearer {token}"}, REMOTE).caller_id


@pytest.mark.parametrize("method", [f"{ROUTER}Explain", f"{ROUTER}Dump", REFLECTION])
def test_the_token_of_operators_permits_their_methods_without_an_id(method: str) -> None:
    assert check(method, "operators") == 0


@pytest.mark.parametrize("method", [f"{ROUTER}Explain", REFLECTION])
@pytest.mark.parametrize("token", ["guess", "mesh", "", "operators "])
def test_another_token_permits_nothing(method: str, token: str) -> None:
    with pytest.raises(Unauthenticated, match="a proof of the mesh token is required"):
        check(method, token)


@pytest.mark.parametrize("method", ["Session", "Sync"])
def test_the_token_of_operators_does_not_permit_the_methods_of_services(method: str) -> None:
    with pytest.raises(Unauthenticated, match="a proof of the mesh token is required"):
        check(f"{ROUTER}{method}", "operators")


def test_the_token_of_operators_does_not_permit_operations_on_a_process() -> None:
    with pytest.raises(PermissionDenied, match="AdminService is off"):
        check("/kvmesh.engine.v1.AdminService/Drain", "operators")


def test_without_the_setting_no_bearer_token_is_accepted() -> None:
    for token in ("", "None", "operators"):
        with pytest.raises(Unauthenticated):
            check(f"{ROUTER}Explain", token, operator_token=None)
