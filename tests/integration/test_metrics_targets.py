"""What Prometheus finds of a mesh: its targets, and the metrics of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from common.registry.instances import METRICS_META_KEY, Instance, Snapshot
from common.registry.registry import MemoryRegistry, MemoryStore
from frontend_svc.metrics.targets import metrics_targets
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from tests.kit.apps import living
from tests.kit.local_mesh import LocalMesh, local_mesh
from tests.kit.waiting import until
from tools.dashboards.catalog import catalog

OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0"}


def member(number: int, url: str, name: str = "") -> Instance:
    meta = {METRICS_META_KEY: url} if url else {}
    return Instance(number, "mesh", "router", name, f"h{number}:1", meta=meta)


def test_members_that_share_an_address_are_one_target_and_those_without_one_are_none() -> None:
    members = (
        member(1, "https://a:9464/m", "f-0"),
        member(2, "https://a:9464/m", "f-1"),
        member(3, "http://b:1/metrics"),
        member(4, ""),
    )
    assert metrics_targets(Snapshot(1, {one.id: one for one in members})) == [
        {
            "targets": ["a:9464"],
            "labels": {"instance": "f-0", "__scheme__": "https", "__metrics_path__": "/m"},
        },
        {
            "targets": ["b:1"],
            "labels": {"instance": "b:1", "__scheme__": "http", "__metrics_path__": "/metrics"},
        },
    ]


@pytest.fixture
async def mesh() -> AsyncGenerator[LocalMesh, None]:
    store = MemoryStore()
    indexer = IndexerConfig(registry="memory", metrics_port=0, stable_name="i")
    async with (
        local_mesh(lambda: MemoryRegistry(store), stable_name="f") as mesh,
        living(IndexerApp(indexer, registry=mesh.connect())),
        mesh.router(metrics_port=0, stable_name="r"),
        mesh.worker(model_name="m", metrics_port=0, stable_name="w", role="aggregated"),
    ):
        yield mesh


# Any: JSON.
async def scrape(target: Any) -> dict[str, Metric]:
    """Returns the metrics of a target by name, as Prometheus reads them."""
    labels, (address,) = target["labels"], target["targets"]
    url = f"{labels['__scheme__']}://{address}{labels['__metrics_path__']}"
    async with httpx.AsyncClient(trust_env=False) as http:
        response = await http.get(url, headers=OPENMETRICS)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = text_string_to_metric_families(response.text)  # type: ignore[no-untyped-call]
    return {one.name: one for one in families}


async def test_the_targets_have_the_documented_form(mesh: LocalMesh) -> None:
    path = "/v1/internal/metrics-targets"
    operation = (await mesh.http.get("/openapi.json")).json()["paths"][path]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate((await mesh.http.get(path)).json(), schema)


@pytest.mark.slow
async def test_every_member_is_a_target_and_all_its_metrics_are_in_the_reference(
    mesh: LocalMesh,
) -> None:
    assert (await mesh.complete(max_tokens=3)).status_code == 200

    async def all_are_listed() -> bool:
        listed = (await mesh.http.get("/v1/internal/metrics-targets")).json()
        return {one["labels"]["instance"] for one in listed} == {"f", "i", "r", "w"}

    await until(all_are_listed, "the frontend lists all members")
    metrics = await asyncio.to_thread(catalog)
    known = {one.name.removesuffix("_total"): one for one in metrics}
    roles = {}
    for target in (await mesh.http.get("/v1/internal/metrics-targets")).json():
        found = await scrape(target)
        for name, metric in found.items():
            assert name in known, f"python -m tools.dashboards: {name} is not in docs/metrics.md"
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            assert labels <= set(known[name].labels), name
        (info,) = found["kvmesh_instance_info"].samples
        roles[info.labels["stable_name"]] = info.labels["role"], info.labels["model"]
        assert found["kvmesh_registry_reachable"].samples[0].value == 1
    assert roles == {
        "f": ("frontend", ""),
        "r": ("router", ""),
        "i": ("indexer", ""),
        "w": ("aggregated", "m"),
    }


@pytest.mark.slow
async def test_a_frontend_counts_the_registered_members_by_role(mesh: LocalMesh) -> None:
    text = await mesh.scrape()
    for role, count in {"aggregated": 1, "router": 1, "indexer": 1, "prefill": 0}.items():
        assert f'kvmesh_frontend_members{{role="{role}"}} {count}.0' in text
