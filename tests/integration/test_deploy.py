"""The files of `docker compose up`, checked without a container engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import PermissionDenied, Unavailable
from common.registry.card import Artifact, ModelCard
from common.registry.consul.registry import ConsulRegistry
from common.registry.instances import Instance
from common.registry.registry import Lease
from common.runtime.config import read_config
from common.runtime.free_ports import free_ports
from frontend_svc.config import FrontendConfig
from tests.contract.consul_agent import PORTS, consul_binary
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(sys.executable).parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
METRIC = re.compile(r"\bkvmesh_[a-z_]+")


def dockerfile() -> str:
    return (ROOT / "deploy/Dockerfile").read_text()


def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run(
        [BINARIES / "hadolint", ROOT / "deploy/Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_is_understood_and_every_build_target_exists() -> None:
    done = subprocess.run(
        [BINARIES / "docker-compose", "-f", ROOT / "docker-compose.yml", "config"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    targets = {s["build"]["target"] for s in services.values() if "build" in s}
    assert targets == {"frontend", "router", "indexer", "worker"}
    assert targets <= set(re.findall(r"^FROM base AS (\w+)$", dockerfile(), re.MULTILINE))


def test_ports_are_published_on_this_host_only() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to other hosts"


def test_the_frontend_of_the_compose_file_accepts_its_configuration(tmp_path: Path) -> None:
    variables = dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", dockerfile()))
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    for name, value in COMPOSE["services"]["frontend"]["environment"].items():
        text = str(secret) if name.endswith("_FILE") else value
        variables[name] = re.sub(r"\$\{\w+:-(.*)\}", r"\1", text)
    # deploy/serve.sh sets the flag.
    config, _ = read_config(FrontendConfig, "FRONTEND", variables, ["--advertise-host=frontend"])
    assert config.http_host == "0.0.0.0"
    assert (config.mesh_token, config.consul_token) == ("s3cret", "s3cret")


def test_every_file_and_volume_that_a_service_mounts_is_there() -> None:
    for service in COMPOSE["services"].values():
        for source, *_ in (volume.split(":") for volume in service.get("volumes", [])):
            is_file = source.startswith(".")
            assert (ROOT / source).exists() if is_file else source in COMPOSE["volumes"], source


def test_no_container_has_a_writable_root_or_privileges_or_unbounded_resources() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] > 0, name
        assert service["mem_limit"], name
        assert "cap_add" not in service, name
        assert "privileged" not in service, name


def test_the_compose_file_has_no_secret_and_every_secret_is_read_from_a_volume() -> None:
    for name, service in COMPOSE["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search("TOKEN|PASSWORD|SECRET|_KEY", variable):
                assert variable.endswith("_FILE"), f"{name} has the secret {variable}"
                assert value.startswith("/run/kvmesh/"), variable
    secrets = {"service-secrets", "consul-secrets", "metrics-secrets"}
    mounts = {
        name: {v.split(":")[0] for v in service.get("volumes", [])} & secrets
        for name, service in COMPOSE["services"].items()
    }
    assert mounts.pop("secrets") == secrets
    assert mounts.pop("consul") == {"service-secrets", "consul-secrets"}
    assert mounts.pop("prometheus") == {"metrics-secrets"}
    services = {"frontend", "router", "indexer", "prefill", "decode"}
    assert {name for name, found in mounts.items() if found} == services
    assert not any("consul-secrets" in found for found in mounts.values())


def test_images_are_pinned_to_an_exact_version() -> None:
    images = [s["image"] for s in COMPOSE["services"].values() if "build" not in s]
    images += re.findall(r"^FROM (\S+:\S+)", dockerfile(), re.MULTILINE)
    assert len(images) >= 6
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", image), image


def test_secrets_are_generated_once_and_differ(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("service", "consul", "metrics")]
    for folder in folders:
        folder.mkdir()

    def generate() -> dict[str, str]:
        subprocess.run([ROOT / "deploy/make_secrets.sh", *folders], check=True)
        return {path.name: path.read_text() for folder in folders for path in folder.iterdir()}

    made = generate()
    assert re.fullmatch("[0-9a-f]{64}", made["mesh_token"])
    assert set(made) == {"mesh_token", "consul_token", "management_token", "metrics_key"}
    assert len(set(made.values())) == len(made)
    assert generate() == made


@pytest.fixture
def consul(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of the compose file's agent and the token of the services."""
    binary = consul_binary()
    for name in ("management", "service"):
        (tmp_path / name).write_text(f"{uuid.uuid4()}\n")
    first = free_ports(len(PORTS))
    flags = [f"-{name}-port={first + at}" for at, name in enumerate(PORTS)]
    command = [ROOT / "deploy/consul.sh", tmp_path / "management", tmp_path / "service"]
    url = f"http://127.0.0.1:{first}"
    environ = {
        "PATH": f"{Path(binary).parent}:/usr/bin:/bin",
        "CONSUL_HTTP_ADDR": url,
        "CONSUL_MANAGEMENT_SETTING": "master",  # The agent of the tests is older than 1.11.
    }
    with subprocess.Popen(
        [*command, ROOT / "deploy/consul_policy.hcl", "-bind=127.0.0.1", *flags],
        env=environ,
        stdout=subprocess.DEVNULL,
    ) as agent:
        yield url, (tmp_path / "service").read_text().strip()
        agent.terminate()


async def test_consul_permits_the_services_what_they_need_and_others_nothing(
    consul: tuple[str, str],
) -> None:
    url, token = consul
    service, anonymous = ConsulRegistry(url, token=token), ConsulRegistry(url)
    card = ModelCard(name="m", artifacts={"a": Artifact.of(b"x" * 100_000)})
    try:
        async with asyncio.timeout(20.0):
            lease = await _register(service, Instance(1, "default", "worker", "", "a:1"))
            assert (await service.snapshot("default")).instances
            await service.put_card(card)
            assert await service.get_card(card.checksum) == card
            assert not (await anonymous.snapshot("default")).instances
            with pytest.raises(PermissionDenied):
                await anonymous.register(Instance(2, "default", "worker", "", "a:2"))
            await lease.close()
    finally:
        await service.close()
        await anonymous.close()


async def _register(registry: ConsulRegistry, instance: Instance) -> Lease:
    """Registers once the agent has the policy."""

    async def registered() -> Lease | None:
        with suppress(PermissionDenied, Unavailable):
            return await registry.register(instance)
        return None

    lease = await until(registered, "the agent has the policy")
    assert lease is not None
    return lease


def test_every_folder_that_the_dockerfile_copies_is_there() -> None:
    copies = re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile(), re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    for source in sources:
        assert (ROOT / source).exists(), source
    compiled = load(ROOT / "tools/compile.py").GROUPS.values()
    assert {path.split("/")[0] for group in compiled for path in group} <= sources


def test_status_runs_with_the_variables_of_the_images(tmp_path: Path) -> None:
    variables = dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", dockerfile()))
    assert variables["KVMESH_HOST"] == "0.0.0.0"
    done = subprocess.run(
        [sys.executable, "-m", "meshctl", "status", "--registry-path", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**variables, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
    )
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    assert done.stdout.startswith("no instance in namespace 'default'")


def test_environments_stay_out_of_the_images_and_are_removed_by_make_clean() -> None:
    assert {".venv", ".venv-*"} <= set((ROOT / ".dockerignore").read_text().split())
    (clean,) = re.findall(r"^\trm -rf (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"$(VENV)", ".venv-sglang"} <= set(clean.split())


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_what_its_script_writes() -> None:
    made = load(ROOT / "deploy/make_dashboard.py").dashboard()
    checked_in = json.loads((ROOT / "deploy/grafana/dashboards/kvmesh.json").read_text())
    assert made == checked_in, "run: python deploy/make_dashboard.py"


def test_queries_name_metrics_that_the_services_have() -> None:
    from prometheus_client import CollectorRegistry

    from frontend_svc.metrics.collectors import CanaryCollector, CircuitCollector
    from frontend_svc.metrics.families import FrontendMetrics
    from router_svc.core.router import Router
    from router_svc.core.selectors import SELECTORS
    from router_svc.metrics import Metrics as RouterMetrics
    from worker_svc.engines.echo import EchoConfig, EchoEngine
    from worker_svc.metrics import worker_registry
    from worker_svc.serving.runner import Runner

    frontend = CollectorRegistry()
    for collector in FrontendMetrics().collectors:
        frontend.register(collector)
    frontend.register(CircuitCollector(lambda: {"failing": 0}, "kvmesh_frontend"))
    frontend.register(CanaryCollector(lambda: {"m": (True, 0.0)}, "kvmesh_frontend"))
    registries = [
        frontend,
        RouterMetrics(Router(SELECTORS["least_loaded"]())).registry,
        worker_registry(Runner(EchoEngine(EchoConfig()))),
    ]
    known: set[str] = set()
    for registry in registries:
        for family in registry.collect():
            suffixes = {
                "counter": ("_total",),
                "histogram": ("_bucket", "_sum", "_count"),
                "gauge": ("",),
            }[family.type]
            known |= {family.name + suffix for suffix in suffixes}
    rules = (ROOT / "deploy/alerts.yml").read_text()
    dashboard = (ROOT / "deploy/grafana/dashboards/kvmesh.json").read_text()
    queried = set(METRIC.findall(rules)) | set(METRIC.findall(dashboard))
    assert queried, "the dashboard has queries"
    assert queried <= known, f"no service has {sorted(queried - known)}"


def test_alert_rules_are_valid_where_promtool_is_installed() -> None:
    promtool = shutil.which("promtool")
    rules = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    assert all(r["expr"] and r["labels"]["severity"] for g in rules["groups"] for r in g["rules"])
    if promtool is not None:
        subprocess.run([promtool, "check", "rules", ROOT / "deploy/alerts.yml"], check=True)
