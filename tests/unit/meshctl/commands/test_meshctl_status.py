"""Output of `meshctl status` for a mesh."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from common.inspection.members import FAILING
from common.registry.file import FileRegistry
from common.registry.instances import Instance, Role, Service
from common.runtime.config import ServiceConfig
from common.service.routable.peers import Routable, WaitingPeer
from kvmesh.types.v1 import load_pb2
from meshctl.commands.status import (
    EXIT_UNREACHABLE,
    Row,
    describe_failures,
    describe_token_problem,
    gather,
    status,
)
from meshctl.options import UpOptions
from meshctl.services import build_service_specs

# No process listens on port 1.
ADDRESS = "127.0.0.1:1"
BIG_ID = 2**62 + 1


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshctl.commands.status.TIMEOUT_S", 20.0)


def member(
    id_: int, service: Service, name: str = "", role: Role = "aggregated", model: str = ""
) -> Instance:
    return Instance(id_, "default", service, name, ADDRESS, role=role, model=model)


def test_json_rows_have_numbers_nulls_and_ids_as_text() -> None:
    loads = (
        load_pb2.Load(running=2, waiting=1, kv_used_blocks=1, kv_total_blocks=8),
        load_pb2.Load(running=1, kv_used_blocks=1, kv_total_blocks=8),
    )
    worker = Row(member(BIG_ID, "worker", "worker-0", model="sim"), "serving", loads)
    assert json.loads(json.dumps(worker.fields())) == {
        "service": "worker",
        "name": "worker-0",
        "id": str(BIG_ID),
        "address": ADDRESS,
        "model": "sim",
        "role": "aggregated",
        "health": "serving",
        "routable": None,
        "running": 3,
        "waiting": 1,
        "kv": 0.125,
    }
    router = Row(member(2, "router"), "serving").fields()
    absent = ("name", "model", "role", "running", "waiting", "kv")
    assert [router[key] for key in absent] == [None] * 6


def test_table_ids_are_decimal_and_absent_values_are_dashes() -> None:
    load = load_pb2.Load(kv_used_blocks=1, kv_total_blocks=8)
    cells = Row(member(BIG_ID, "worker", "worker-0", model="sim"), "serving", (load,)).cells()
    assert cells[2] == str(BIG_ID)
    assert cells[-3:] == ("0", "0", "12 %")
    assert Row(member(2, "router"), "serving").cells() == (
        *("router", "-", "2", ADDRESS, "-", "-", "serving"),
        *("-", "-", "-", "-"),
    )


async def test_rows_have_the_order_of_the_table_of_up(tmp_path: Path) -> None:
    specs = build_service_specs(
        UpOptions(frontends=2, workers=11, prefill=2, decode=2, http_port=0)
    )
    shown = [spec.name for spec in specs]
    services: dict[str, Service] = {"frontend": "frontend", "router": "router"}
    services |= {"indexer": "indexer"}
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
    mixed = list(enumerate(shown, start=1))
    Random(3).shuffle(mixed)
    async with AsyncExitStack() as stack:
        registry = FileRegistry(tmp_path)
        stack.push_async_callback(registry.close)
        for id_, name in mixed:
            kind = name.partition("-")[0]
            service, role = services.get(kind, "worker"), roles.get(kind, "aggregated")
            await registry.register(member(id_, service, name, role))
        rows = await gather(ServiceConfig(registry_path=tmp_path))
    assert [row.instance.stable_name for row in rows] == shown
    assert {row.health for row in rows} == {"unavailable"}


def test_an_empty_mesh_is_reported_with_its_registry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    for path, note in ((tmp_path / "there", ""), (tmp_path / "no", " (folder does not exist)")):
        config = ServiceConfig(registry_path=path, namespace="n1")
        assert status(config, as_json=False) == 1
        expected = f"no instance in namespace 'n1' of the registry {path}{note}\n"
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("as_json", [True, False])
def test_an_unreachable_registry_is_not_an_empty_mesh(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ServiceConfig(registry="consul", consul_url=f"http://{ADDRESS}")
    assert status(config, as_json=as_json) == EXIT_UNREACHABLE
    shown = capsys.readouterr()
    assert f"meshctl: cannot reach Consul at http://{ADDRESS}\n" in shown.err
    assert "nobody" not in shown.out
    assert "[]" not in shown.out


def test_an_unauthenticated_call_prints_the_mesh_token_hint() -> None:
    known = Row(member(1, "worker"), "serving")
    unknown = Row(member(2, "worker"), "unauthenticated")
    assert describe_token_problem([known], ServiceConfig()) == ""
    assert "KVMESH_MESH_TOKEN is not set" in describe_token_problem(
        [known, unknown], ServiceConfig()
    )
    other = describe_token_problem([unknown], ServiceConfig(mesh_token="t"))
    assert "KVMESH_MESH_TOKEN differs from the mesh's" in other


def test_a_worker_with_a_failing_engine_is_listed_with_the_reason() -> None:
    worker = member(BIG_ID, "worker", "worker-0", model="sim")
    row = Row(worker, FAILING, (load_pb2.Load(),), "CUDA error")
    assert row.cells()[6] == "failing"
    assert row.fields()["failure"] == "CUDA error"
    well = Row(member(2, "worker"), "serving")
    assert "failure" not in well.fields()
    assert describe_failures([row, well]) == "worker-0: its engine fails: CUDA error\n"


def test_the_peers_that_a_member_misses_are_named() -> None:
    silent = WaitingPeer(BIG_ID, "frontend-1", "frontend", "it has not responded yet")
    other = WaitingPeer(7, "", "router", "its index lacks the worker")
    states = {
        "yes": Routable(True),
        "no (2 missing)": Routable(False, missing=(silent, other)),
        "yes (1 missing)": Routable(True, given_up=(silent,)),
        "leaving": Routable(False, is_leaving=True, missing=(silent,)),
    }
    worker = member(1, "worker", "worker-0")
    rows = [Row(worker, "serving", routable=state) for state in states.values()]
    assert [row.cells()[7] for row in rows] == list(states)
    assert describe_failures(rows).splitlines() == [
        "worker-0: waits for frontend frontend-1: it has not responded yet",
        "worker-0: waits for router 7: its index lacks the worker",
        "worker-0: does not wait for frontend frontend-1: it has not responded yet",
        "worker-0: still gets work of frontend frontend-1: it has not responded yet",
    ]
    assert (rows[0].fields()["routable"], rows[1].fields()["routable"]) == (True, False)
    assert rows[1].fields()["missing"][0] == {
        "service": "frontend",
        "name": "frontend-1",
        "id": str(BIG_ID),
        "reason": "it has not responded yet",
    }
    assert "missing" not in rows[2].fields()
    assert len(rows[2].fields()["given_up"]) == 1
