"""Which members a rolling restart replaces, in which order and how."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from common.errors import InvalidRequest
from meshctl.process.rollout import Member, Step, check_drain, plan, select
from meshctl.services import ServiceSpec


def member(name: str, role: str = "", *, is_live: bool = True, **values: object) -> Member:
    service = name.rpartition("-")[0]
    if role:
        service, role = "worker", f"{role} worker of m"
    spec = ServiceSpec(name, f"{service}_svc", (), 0, 1.0, role=role or service)
    for key, value in values.items():
        object.__setattr__(spec, key, value)
    return Member(spec, is_live)


PAIR = [member("worker-0", "aggregated"), member("worker-1", "aggregated")]
MESH = [
    member("frontend-0", http_port=0),
    member("frontend-1", http_port=0),
    member("router-0"),
    member("indexer-0"),
    *PAIR,
    member("prefill-0", "prefill"),
]


def steps(
    members: list[Member],
    *names: str,
    new_first: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Step]:
    return plan(members, select(members, names), environ or {}, new_first=new_first)


def test_without_names_all_members_are_replaced_those_that_receive_work_first() -> None:
    names = [step.name for step in steps(MESH)]
    assert names[0] == "indexer-0"
    assert names[-2:] == ["frontend-0", "frontend-1"]
    assert len(names) == len(MESH)


def test_frontends_and_only_members_are_replaced_new_first_and_others_old_first() -> None:
    assert {step.name: step.new_first for step in steps(MESH)} == {
        "frontend-0": True,
        "frontend-1": True,
        "router-0": True,
        "indexer-0": True,
        "worker-0": False,
        "worker-1": False,
        "prefill-0": True,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("worker-1", ["worker-1"]),
        ("worker", ["worker-0", "worker-1", "prefill-0"]),
        ("prefill", ["prefill-0"]),
        ("aggregated", ["worker-0", "worker-1"]),
        ("frontend", ["frontend-0", "frontend-1"]),
    ],
)
def test_a_name_selects_a_member_a_service_or_a_role(name: str, expected: list[str]) -> None:
    assert [step.name for step in steps(MESH, name)] == expected


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(InvalidRequest, match=r"'worker-2': no such member.*did you mean worker-"):
        steps(MESH, "worker-2")


def test_the_last_live_member_of_a_role_is_never_ended_first() -> None:
    one_down = [PAIR[0], member("worker-1", "aggregated", is_live=False)]
    assert steps(one_down) == [Step("worker-0", new_first=True), Step("worker-1", new_first=False)]
    with pytest.raises(InvalidRequest, match="worker-0 is the last live aggregated worker of m"):
        steps(one_down, "worker-0", new_first=False)
    with pytest.raises(InvalidRequest, match="is the last live router"):
        check_drain(MESH, "router-0")
    assert check_drain(MESH, "worker-0").spec.name == "worker-0"
    with pytest.raises(InvalidRequest, match="names 2 members"):
        check_drain(MESH, "aggregated")


@pytest.mark.parametrize("variable", ["KVMESH_WORKER_PORT", "KVMESH_METRICS_PORT"])
def test_a_member_with_a_fixed_port_is_not_replaced_new_first(variable: str) -> None:
    environ = {variable: "7000"}
    with pytest.raises(InvalidRequest, match=r"prefill-0 cannot be replaced new-first.*fixed"):
        steps(MESH, "prefill-0", environ=environ)
    with pytest.raises(InvalidRequest, match="worker-0 cannot be replaced new-first"):
        steps(MESH, "worker-0", new_first=True, environ=environ)
    assert steps(MESH, "worker-0", environ=environ) == [Step("worker-0", new_first=False)]
    ended = [member("prefill-0", "prefill", is_live=False)]
    assert not steps(ended, environ=environ)[0].new_first


def test_frontends_of_several_processes_are_replaced_new_first() -> None:
    environ = {"KVMESH_FRONTEND_PROCESSES": "2"}
    one = [member("frontend-0", http_port=8000)]
    assert steps(one, environ=environ) == [Step("frontend-0", new_first=True)]


@pytest.mark.parametrize("which", ["old", "new"])
def test_a_frontend_that_binds_its_port_is_replaced_old_first_where_another_one_serves(
    which: str,
) -> None:
    two = [
        member("frontend-0", http_port=8000, binds_port=which == "old"),
        member("frontend-1", http_port=8001),
    ]
    successor = member("frontend-0", http_port=8000, binds_port=which == "new").spec
    successors = {"frontend-0": successor}
    selected = select(two, ["frontend-0"])
    assert plan(two, selected, {}, successors=successors) == [
        Step("frontend-0", new_first=False, fixed="http_port")
    ]
    with pytest.raises(
        InvalidRequest, match="fixed http_port; the process of its version binds it"
    ):
        plan(two[:1], selected, {}, successors=successors)


def test_a_console_is_replaced_old_first_and_last() -> None:
    members = [*MESH, member("console-0", is_observer=True)]
    assert steps(members)[-1] == Step("console-0", False)
    assert check_drain(members, "console").spec.name == "console-0"
