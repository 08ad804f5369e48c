"""The console's backend on a mesh of processes: members, requests, spans, index and actions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from common.access.key_file import KeyFile
from common.api_keys import parse_keys
from common.errors import InvalidRequest, NotFound, PermissionDenied
from common.registry.open import open_registry
from common.rpc import channel as rpc
from common.runtime.free_ports import free_ports
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from console_svc.backend import Backend
from console_svc.config import ConsoleConfig
from console_svc.live_state import LiveState
from console_svc.state.actions import ChatRequest, ReplayRequest
from console_svc.state.tenants import TenantView
from console_svc.traces.tree import build_stages
from tests.kit.processes import Mesh
from tests.kit.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

PROMPT = list(range(300, 420))


@pytest.fixture(scope="module")
def otlp_port() -> int:
    return free_ports(1)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, otlp_port: int) -> Iterator[Mesh]:
    """A disaggregated mesh that exports all spans to the console."""
    spans = [f"--otlp-endpoint=http://127.0.0.1:{otlp_port}", "--trace-sample-ratio=1"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=0,
        prefill=1,
        decode=1,
        indexers=1,
        frontend_flags=spans,
        router_flags=spans,
        worker_flags=[*spans, "--speedup=0"],
        named=True,
    ) as running:
        yield running


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    key = {"id": "k1", "sha256": "0" * 64, "scopes": ["infer"], "created": "2026-01-01T00:00:00Z"}
    limits = {"concurrency": 3, "weight": 2.0}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": {"t": {"keys": [key], "limits": limits}}}))
    return path


@pytest.fixture
async def state(mesh: Mesh, otlp_port: int, key_path: Path) -> AsyncIterator[LiveState]:
    config = ConsoleConfig(
        registry_path=mesh.folder / "registry",
        otlp_port=otlp_port,
        interval_s=0.2,
        api_keys=key_path,
    )
    registry = open_registry(config)
    backend = Backend(config, registry, rpc.security_from_config(config), KeyFile(key_path))
    lifecycle = Lifecycle(HealthReporter())
    try:
        await backend.start(lifecycle)
        yield backend.state
    finally:
        lifecycle.drain("test over")
        assert await lifecycle.cancel_tasks(WAIT_S) == []
        await backend.close()
        await registry.close()


async def test_it_shows_the_members_with_health_load_index_and_model(state: LiveState) -> None:
    changes: list[int] = []
    unsubscribe = state.subscribe(lambda: changes.append(state.version))

    def all_serve() -> bool:
        return len(state.members) == 5 and all(m.is_healthy for m in state.members)

    await until(all_serve, "five members serve")
    names = [member.name for member in state.members]
    assert names == ["frontend-1", "router-1", "indexer-1", "prefill-1", "decode-1"]
    worker = state.member("prefill-1")
    assert worker is not None
    assert (worker.role, worker.running, worker.kv_use) == ("prefill", 0, 0.0)
    await until(lambda: all(m.is_routable for m in state.members), "all are routable")
    await until(lambda: state.overview.traffic.requests_per_s is not None, "the traffic is known")
    (model,) = state.models
    assert model.workers == {"prefill": ("prefill-1",), "decode": ("decode-1",)}
    assert "tokenizer.json" in model.artifacts
    await until(lambda: state.index and len(state.index[0].sources) == 2, "the index is known")
    assert {source.worker for source in state.index[0].sources} == {"prefill-1", "decode-1"}
    assert all(source.is_exact for source in state.index[0].sources)
    assert changes
    unsubscribe()
    assert state.overview.registry.startswith("the registry ")
    assert not state.overview.problems


def has_stages(state: LiveState) -> bool:
    row = state.find_request("mine")
    return row is not None and bool(row.stages)


async def test_a_request_has_spans_with_the_link_and_the_reason_of_its_worker(
    state: LiveState, mesh: Mesh
) -> None:
    await until(lambda: len(state.members) == 5, "the members are known")
    response = mesh.post_completion("mine", PROMPT, max_tokens=4)
    assert response.status_code == 200
    id_ = response.json()["id"]

    def is_linked() -> bool:
        found = state.trace("mine")
        if found is None or not found.links:
            return False
        # Each service exports its spans in its own time.
        return {span.service for span in found.spans} == {"frontend", "router", "worker"}

    await until(is_linked, "the spans have arrived")
    trace = state.trace("mine")
    assert trace is not None
    spans = {span.span_id: span for span in trace.spans}
    (link,) = trace.links
    assert spans[link.from_id].member == "prefill-1"
    assert spans[link.to_id].member == "decode-1"
    await until(lambda: state.find_request("mine"), "the request is listed")
    await until(lambda: has_stages(state), "its frontend reports it")
    row = state.find_request("mine")
    assert row is not None
    assert row.workers == ("prefill-1", "decode-1")
    assert [stage.name for stage in row.stages][:5] == [
        *("tokenize", "route", "prefill", "handoff", "decode"),
    ]
    stages = build_stages(row)
    assert stages is not None
    assert [(link.from_id, link.to_id) for link in stages.links] == [("prefill", "decode")]
    assert (row.router, row.http_status, row.output_tokens) == ("router-1", 200, 4)
    assert state.find_request(id_) is row
    assert (row.is_split, row.model, row.is_error) == (True, "sim", False)
    assert row in state.requests
    explanation = await state.explain(id_)
    assert (explanation.prefill, explanation.worker) == ("prefill-1", "decode-1")
    assert explanation.reasons
    chosen = [found for found in explanation.candidates if found.is_chosen]
    assert {(found.leg, found.worker) for found in chosen} == {
        ("prefill", "prefill-1"),
        ("decode", "decode-1"),
    }
    with pytest.raises(NotFound, match="4096"):
        await state.explain("absent")


async def test_the_playground_streams_tokens_usage_and_placement(state: LiveState) -> None:
    await until(lambda: state.member("frontend-1"), "the frontend is known")
    message = {"role": "user", "content": "Hello"}
    async with aclosing(state.chat(ChatRequest("sim", (message,), max_tokens=5))) as deltas:
        found = [delta async for delta in deltas]
    assert "".join(delta.text for delta in found)
    assert found[0].request_id
    (usage,) = [delta.usage for delta in found if delta.usage]
    assert usage["completion_tokens"] == 5
    assert any(delta.placement for delta in found)
    with pytest.raises((InvalidRequest, NotFound)):
        async with aclosing(state.chat(ChatRequest("absent", (message,)))) as deltas:
            await anext(deltas)


async def test_an_operator_revokes_a_key(state: LiveState, key_path: Path) -> None:
    def tenant() -> TenantView:
        # Requests of other tests without a key have a tenant of their own.
        return next(one for one in state.tenants.tenants if one.name == "t")

    await until(lambda: state.tenants.tenants, "the tenants are known")
    assert (tenant().concurrency, tenant().weight) == (3, 2.0)
    assert state.tenants.can_revoke
    with pytest.raises(NotFound):
        await state.revoke_key("k9")
    await state.revoke_key("k1")
    raw = await asyncio.to_thread(key_path.read_bytes)
    assert list(parse_keys(raw).entries()) == []
    assert tenant().keys == ()


async def test_a_replay_compares_policies(state: LiveState) -> None:
    await until(lambda: state.replay_workloads, "the workloads are known")
    workload = state.replay_workloads[0]
    report = await state.replay(ReplayRequest(workload, ("kv", "random"), 2, 50))
    assert [run.policy for run in report.runs] == ["kv", "random"]
    assert report.runs[0].figures["hit_rate"] is not None
    with pytest.raises(InvalidRequest, match="no trace"):
        await state.replay(ReplayRequest("../secret"))


async def test_a_worker_that_dies_leaves_and_its_successor_joins(
    state: LiveState, mesh: Mesh
) -> None:
    await until(lambda: len(state.members) == 5, "the members are known")
    old = mesh.of_kind("decode")[0]
    old.kill()
    new = mesh.spawn("decode").wait_ready()

    def is_replaced() -> bool:
        found = state.member(str(new.instance_id))
        return found is not None and found.is_healthy and not state.member(str(old.instance_id))

    await until(is_replaced, "the successor serves")
    events = [(event.name, event.kind) for event in state.events]
    assert events.index(("decode-1", "left")) < events.index(("decode-1", "joined"))
    assert ("decode-2", "joined") in events


async def test_without_a_file_of_keys_nothing_is_revoked(mesh: Mesh) -> None:
    config = ConsoleConfig(registry_path=mesh.folder / "registry", otlp_port=0)
    registry = open_registry(config)
    backend = Backend(config, registry, rpc.security_from_config(config), None)
    with pytest.raises(PermissionDenied):
        await backend.state.revoke_key("k1")
    await backend.close()
    await registry.close()
