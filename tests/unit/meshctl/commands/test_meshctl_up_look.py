"""Checks of the registry by `meshctl up` before it starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.registry.file import FileRegistry
from common.registry.instances import Instance
from common.registry.open import open_registry
from common.runtime.config import ServiceConfig
from meshctl.commands.up import describe_existing_services


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshctl.commands.up.LOOKUP_TIMEOUT_S", 20.0)


async def look(config: ServiceConfig) -> str:
    registry = open_registry(config)
    try:
        return await describe_existing_services(registry, config)
    finally:
        await registry.close()


async def test_joining_an_existing_mesh_prints_a_notice_with_the_alternative(
    tmp_path: Path,
) -> None:
    config = ServiceConfig(registry_path=tmp_path)
    living = FileRegistry(tmp_path)
    await living.register(Instance(1, "default", "worker", "worker-0", "127.0.0.1:1"))
    await living.register(Instance(2, "default", "router", "", "127.0.0.1:1"))
    text = await look(config)
    assert "namespace 'default' already has 2 services (router, worker-0)" in text
    assert "--namespace" in text
    assert "\n" not in text
    elsewhere = ServiceConfig(registry_path=tmp_path, namespace="other")
    assert await look(elsewhere) == ""
    await living.close()
    assert await look(config) == ""


async def test_an_unreachable_registry_is_reported_before_services_start() -> None:
    text = await look(ServiceConfig(registry="consul", consul_url="http://127.0.0.1:1"))
    assert "cannot reach Consul at http://127.0.0.1:1" in text
