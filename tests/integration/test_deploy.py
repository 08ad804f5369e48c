"""The files of `docker compose up`, checked without a container engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from structlog.testing import capture_logs

from common.errors import PermissionDenied
from common.registry.card import Artifact, ModelCard
from common.registry.consul.registry import ConsulRegistry
from common.registry.instances import Instance
from common.runtime.config import ServiceConfig, read_config
from common.runtime.free_ports import free_ports
from console_svc.config import ConsoleConfig
from frontend_svc.config import FrontendConfig
from indexer_svc.config import IndexerConfig
from router_svc.config import RouterConfig
from tests.compose import __main__ as compose_test
from tests.compose.checks import documented_blocks
from tests.contract.consul_agent import PORTS, consul_binary
from tests.kit.images import CONFIGS, ROOT, dockerfile, read_container_config, stages
from tests.kit.waiting import until, wait_for
from worker_svc.config import WorkerConfig

BINARIES = Path(sys.executable).parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OBSERVABILITY = ROOT / "deploy/observability"
# Of containers that have any: the owner of a file is changed, and its mode after that.
CAPABILITIES = {"secrets": ["CHOWN", "FOWNER"]}


# The services of each profile; "" is without one.
DEFAULT = {
    *("frontend", "router", "indexer", "prefill", "decode", "decode-2"),
    *("consul", "secrets"),
}
PROFILES = {
    "": set[str](),
    "ha": {"frontend-2", "router-2", "indexer-2", "prefill-2", "consul-2", "consul-3"},
    "sglang": {"sglang-model", "sglang-prefill", "sglang-decode"},
    "minimal": {"mesh"},
    "console": {"console"},
    "batch": {"batch"},
    "gateway": {"epp"},
    "observe": {"collector", "jaeger", "prometheus", "grafana"},
}
CONSOLE_OTLP_URL = "http://console:8071"


# Any: the compose file as JSON.
def resolved(*profiles: str, override: str = "", **variables: str) -> dict[str, Any]:
    """Returns the services of profiles as docker compose reads them."""
    files = ["-f", "docker-compose.yml", *(("-f", override) if override else ())]
    done = subprocess.run(
        [
            *(BINARIES / "docker-compose", *files),
            *(word for profile in profiles if profile for word in ("--profile", profile)),
            *("config", "--format", "json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **variables},
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    services: dict[str, Any] = json.loads(done.stdout)["services"]
    return services


def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run(
        [BINARIES / "hadolint", ROOT / "deploy/Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_is_understood_and_every_build_target_exists() -> None:
    targets = {s["build"]["target"] for s in resolved().values() if "build" in s}
    assert targets == {"frontend", "router", "indexer", "worker"}
    assert targets <= set(re.findall(r"^FROM base AS (\w+)$", dockerfile(), re.MULTILINE))
    services = resolved(*PROFILES)
    assert services.keys() == DEFAULT.union(*PROFILES.values()) == COMPOSE["services"].keys()
    targets = {s["build"]["target"] for s in services.values() if "build" in s}
    assert targets == {*CONFIGS, "mesh"}
    assert targets <= stages().keys()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_adds_its_services(profile: str) -> None:
    services = resolved(profile)
    assert services.keys() == DEFAULT | PROFILES[profile]
    for name, service in services.items():
        awaited = set(service.get("depends_on", {}))
        assert awaited <= services.keys(), name


def test_a_profile_of_one_container_needs_no_other() -> None:
    assert not resolved("minimal")["mesh"].get("depends_on")


def test_two_of_each_service_have_different_registries_and_ports() -> None:
    services = resolved("ha")
    for name in ("frontend", "router", "indexer", "prefill"):
        first, second = services[name], services[f"{name}-2"]
        assert first["image"] == second["image"]
        assert first["environment"] == {
            **second["environment"],
            "KVMESH_CONSUL_URL": "http://consul:8500",
        }
        assert second["environment"]["KVMESH_CONSUL_URL"] == "http://consul-2:8500"
    published = [
        (port["host_ip"], port["published"])
        for service in services.values()
        for port in service.get("ports", [])
    ]
    assert len(published) == len(set(published))
    servers = {name: services[name]["environment"] for name in ("consul", "consul-2", "consul-3")}
    for name, environment in servers.items():
        assert {*environment["CONSUL_PEERS"].split(), name} == servers.keys()
    founders = [name for name, environment in servers.items() if "CONSUL_FOUNDS" not in environment]
    assert founders == ["consul"], "two founders would found two clusters"


def test_the_workers_of_sglang_are_a_pair_with_a_model_volume_and_gpus_by_an_override() -> None:
    services = resolved("sglang", SGLANG_MODEL="qwen")
    roles = {"sglang-prefill": "prefill", "sglang-decode": "decode"}
    for name, role in roles.items():
        environment = services[name]["environment"]
        assert environment["KVMESH_WORKER_ROLE"] == role
        assert environment["KVMESH_WORKER_MODEL_PATH"] == "/models/qwen"
        (models,) = [v for v in services[name]["volumes"] if v["target"] == "/models"]
        assert (models["type"], models["source"], models["read_only"]) == ("volume", "models", True)
        assert "deploy" not in services[name]
    host = resolved("sglang", SGLANG_MODELS="/srv/models")["sglang-decode"]["volumes"]
    assert [(v["type"], v["source"]) for v in host if v["target"] == "/models"] == [
        ("bind", "/srv/models")
    ]
    gpus = resolved("sglang", override="deploy/compose.gpu.yml", SGLANG_GPUS="2")
    for name in roles:
        (device,) = gpus[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
        assert gpus[name]["build"]["target"] == "worker-sglang"
    assert gpus["decode"] == resolved("sglang")["decode"]


def test_the_base_images_are_arguments_of_the_build() -> None:
    variables = {"BASE": "b:1", "SGLANG_BASE": "c:2", "SGLANG_KIND": "cuda"}
    services = resolved(*PROFILES, **variables)
    for name, service in services.items():
        if "build" in service:
            assert service["build"]["args"]["BASE"] == "b:1", name
    assert services["sglang-decode"]["build"]["args"] == variables
    for stage in ("python", "worker-sglang"):
        assert re.match(r"\$\{(SGLANG_)?BASE\} AS", stages()[stage])
    assert "case $kind in cpu | cuda)" in (ROOT / "deploy/sglang/venv.sh").read_text()


def test_every_image_runs_as_a_user_without_rights_and_checks_its_health_by_meshctl() -> None:
    found = stages()
    for target in (*CONFIGS, "mesh"):
        text = found[target]
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10001"], target
        checks = text if target == "worker-sglang" else found["base"]
        assert 'CMD ["meshctl", "health", "127.0.0.1:7001"]' in checks
        assert re.search(r"KVMESH_(FRONTEND_)?HEALTH_PORT=7001", found["base"] + text)
    users = {name: s["user"] for name, s in resolved(*PROFILES).items() if "user" in s}
    # It writes into new volumes, and runs once without a network.
    assert {name for name, user in users.items() if user.startswith("0")} == {"secrets"}


def test_the_console_script_of_the_images_is_that_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["meshctl"].partition(":")
    script = (ROOT / "deploy/meshctl").read_text()
    assert f"\nfrom {module} import {function}\n\nsys.exit({function}())\n" in script
    assert os.access(ROOT / "deploy/meshctl", os.X_OK)


def test_a_container_has_time_to_drain() -> None:
    for name, service in resolved("ha").items():
        target = service.get("build", {}).get("target")
        if target not in CONFIGS or name == "secrets":
            continue
        assert service["init"] is True, name
        config = ServiceConfig()
        assert service["stop_grace_period"] == "45s"
        assert config.notice_s + config.drain_s + 10 < 45, name


def test_ports_are_published_on_this_host_only() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to other hosts"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, service in COMPOSE["services"].items()
        if service.get("build", {}).get("target") in CONFIGS
        and not name.startswith(("secrets", "sglang"))
    ],
)
def test_a_service_of_the_compose_file_accepts_its_configuration(tmp_path: Path, name: str) -> None:
    service = resolved(*PROFILES)[name]
    target = service["build"]["target"]
    variables = {}
    for variable, value in service["environment"].items():
        if value is None:
            continue
        secret = tmp_path / variable
        secret.write_text(f"s3cret of {variable}\n")
        variables[variable] = str(secret) if variable.endswith("_FILE") else value
    # deploy/serve.sh sets the flag.
    config, _ = read_container_config(target, variables, [f"--advertise-host={name}"])
    assert config.host == "0.0.0.0"
    assert config.mesh_token == "s3cret of KVMESH_MESH_TOKEN_FILE"
    assert config.operator_token == "s3cret of KVMESH_OPERATOR_TOKEN_FILE"
    assert config.consul_token == "s3cret of KVMESH_CONSUL_TOKEN_FILE"
    assert not config.otlp_endpoint, "without the profile observe no process awaits a collector"
    if isinstance(config, FrontendConfig):
        assert config.http_host == "0.0.0.0"


def test_the_headers_of_the_console_authenticate_exports_to_it_and_to_no_other_collector(
    tmp_path: Path,
) -> None:
    make_secrets(tmp_path)
    key, headers = (tmp_path / "service" / name for name in ("otlp_key", "otlp_headers"))
    others = f"http://collector:4317,{CONSOLE_OTLP_URL}"
    for endpoints in (CONSOLE_OTLP_URL, others):
        variables = {"KVMESH_OTLP_ENDPOINT": endpoints, "KVMESH_OTLP_HEADERS_FILE": str(headers)}
        frontend, _ = read_config(FrontendConfig, "FRONTEND", variables, [])
        found = {endpoint.url: dict(endpoint.headers) for endpoint in frontend.otlp_endpoints}
        assert found.pop(CONSOLE_OTLP_URL) == {"authorization": f"Bearer {key.read_text()}"}
        assert not any(found.values())
        services = resolved("console", **variables)
        console = services["console"]["environment"]
        own = {name: value for name, value in console.items() if "OTLP" in name}
        own["KVMESH_CONSOLE_OTLP_KEY_FILE"] = str(key)
        config, _ = read_config(ConsoleConfig, "CONSOLE", own, [])
        assert (config.otlp_key, config.otlp_endpoints) == (key.read_text(), ())
        environment = services["frontend"]["environment"]
        assert environment["KVMESH_OTLP_HEADERS_FILE"] == str(headers)


def test_the_variables_of_the_sglang_workers_are_settings() -> None:
    known = {f"KVMESH_WORKER_{name.upper()}" for name in WorkerConfig.model_fields}
    known |= {f"KVMESH_{name.upper()}" for name in ServiceConfig.model_fields}
    known |= {f"{name}_FILE" for name in known}
    for name in ("sglang-prefill", "sglang-decode"):
        assert COMPOSE["services"][name]["environment"].keys() <= known


def test_the_container_of_a_whole_mesh_accepts_its_configuration() -> None:
    variables = dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", stages()["base"] + stages()["mesh"]))
    service = resolved("minimal")["mesh"]
    variables |= service["environment"]
    config, _ = read_config(FrontendConfig, "FRONTEND", variables, [])
    assert (config.host, config.http_host, config.health_port) == ("127.0.0.1", "0.0.0.0", 7001)
    others = (("WORKER", WorkerConfig), ("ROUTER", RouterConfig), ("INDEXER", IndexerConfig))
    for prefix, kind in others:
        other, _ = read_config(kind, prefix, variables, [])
        assert (other.host, other.port, other.health_port) == ("127.0.0.1", 0, 0)


def test_prometheus_reads_its_targets_from_every_frontend() -> None:
    document = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    (job,) = document["scrape_configs"]
    key = {"type": "Bearer", "credentials_file": "/run/kvmesh/metrics/metrics_key"}
    assert job["authorization"] == key
    sources = job["http_sd_configs"]
    assert all(source["authorization"] == key for source in sources)
    services = resolved(*PROFILES)
    frontends = [n for n, s in services.items() if s.get("image") == "kvmesh/frontend"]
    assert len(frontends) == 2
    port = services["frontend"]["environment"]["KVMESH_METRICS_PORT"]
    assert {source["url"] for source in sources} == {
        f"http://{name}:{port}/v1/internal/metrics-targets" for name in frontends
    }


def test_documented_calls_of_grpcurl_use_published_ports() -> None:
    calls = "".join(documented_blocks())
    addresses = set(re.findall(r"127\.0\.0\.1:(7\d+)", calls))
    published = {
        port["published"]: port["target"]
        for service in resolved("ha").values()
        for port in service.get("ports", [])
    }
    assert addresses == {"7100", "7200", "7300"}
    assert {published[port] for port in addresses} == {7000}
    for method in (" list", "Explain", "Match", "Generate"):
        assert method in calls
    assert "/run/kvmesh/service/operator_token" in calls


def test_without_a_container_engine_compose_test_names_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = {"podman": (str(tmp_path / "podman"),), "sh": ("/bin/sh",), "runc": ("/no/runc",)}
    monkeypatch.setattr("tests.compose.engine.PACKAGES", packages)
    monkeypatch.setattr("sys.argv", ["compose", "--work", str(tmp_path)])
    assert compose_test.main() == 1
    install = "apt-get install -y --no-install-recommends podman runc"
    assert capsys.readouterr().err.endswith(f"install them as root: {install}\n")


def test_every_file_and_volume_that_a_service_mounts_is_there() -> None:
    for service in COMPOSE["services"].values():
        volumes = (re.sub(r"\$\{\w+:-(.*)\}", r"\1", v) for v in service.get("volumes", []))
        for source, *_ in (volume.split(":") for volume in volumes):
            is_file = source.startswith(".")
            assert (ROOT / source).exists() if is_file else source in COMPOSE["volumes"], source


def test_no_container_has_a_writable_root_or_privileges_or_unbounded_resources() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] > 0, name
        assert service["mem_limit"], name
        assert service.get("cap_add", []) == CAPABILITIES.get(name, []), name
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
    for server in ("consul", "consul-2", "consul-3"):
        assert mounts.pop(server) == {"service-secrets", "consul-secrets"}
    assert mounts.pop("prometheus") == {"metrics-secrets"}
    targets = {name: s.get("build", {}).get("target") for name, s in COMPOSE["services"].items()}
    services = {name for name in mounts if targets[name] in CONFIGS} - {"sglang-model"}
    assert len(services) == 15
    assert {name for name, found in mounts.items() if found} == services
    assert not any("consul-secrets" in found for found in mounts.values())


def test_images_are_pinned_to_an_exact_version() -> None:
    images = [s["image"] for s in COMPOSE["services"].values() if "build" not in s]
    bases = re.findall(r"^ARG (?:SGLANG_)?BASE=(\S+:\S+)", dockerfile(), re.MULTILINE)
    assert len(bases) == 2
    assert all(text.startswith("${") or ":" not in text.split()[0] for text in stages().values())
    images += bases
    assert len(images) >= 6
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", image), image


@pytest.mark.slow
def test_routers_and_indexers_run_without_the_packages_that_their_images_lack() -> None:
    text = " ".join(stages()["core"].replace("\\\n", " ").split())
    names = text.partition("uninstall --yes ")[2].partition(" #")[0].split()
    assert {"tokenizers", "llguidance", "uvicorn"} <= set(names)
    for target in ("frontend", "router", "indexer", "worker", "console", "mesh"):
        copied = r"\nCOPY --from=(text|console-packages|worker-packages) /text /venv"
        has_them = re.search(copied, stages()[target])
        assert bool(has_them) == (target not in ("router", "indexer")), target
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({[n.replace('-', '_') for n in names]}))\n"
        "import importlib, router_svc.app, indexer_svc.app\n"
        "from meshctl.cli import COMMANDS\n"
        "for name in COMMANDS: importlib.import_module(f'meshctl.commands.{name}')\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"}
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=ROOT, check=True)


def make_secrets(folder: Path) -> list[Path]:
    """Generates the secrets that are missing; returns their files."""
    folders = [folder / name for name in ("service", "consul", "metrics")]
    for path in folders:
        path.mkdir(exist_ok=True)
    subprocess.run([ROOT / "deploy/make_secrets.sh", *folders], check=True)
    return [path for found in folders for path in found.iterdir()]


def test_secrets_are_generated_once_and_differ(tmp_path: Path) -> None:
    def generate() -> dict[str, str]:
        return {path.name: path.read_text() for path in make_secrets(tmp_path)}

    made = generate()
    assert re.fullmatch("[0-9a-f]{64}", made["mesh_token"])
    assert re.fullmatch("[0-9a-f]{64}", made["operator_token"])
    names = {"mesh_token", "operator_token", "consul_token", "management_token", "metrics_key"}
    names |= {"otlp_key", "otlp_headers"}
    assert set(made) == names
    assert len(set(made.values())) == len(made)
    # A volume of an earlier version.
    (tmp_path / "service" / "mesh_token").chmod(0o644)
    assert generate() == made
    found = {path.name: path.stat() for path in make_secrets(tmp_path)}
    readers = {"consul_token": (0o640, 10001, 1000), "metrics_key": (0o640, 10001, 65534)}
    for name, status in found.items():
        mode, user, group = readers.get(name, (0o600, 10001, status.st_gid))
        user = 100 if name == "management_token" else user
        assert stat.S_IMODE(status.st_mode) == mode, name
        if os.getuid() == 0:
            assert (status.st_uid, status.st_gid) == (user, group), name


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
            lease = await service.register(Instance(1, "default", "worker", "", "a:1"))
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


async def test_a_service_waits_for_a_token_that_consul_does_not_have_yet(
    consul: tuple[str, str], tmp_path: Path
) -> None:
    url, token = consul
    late = str(uuid.uuid4())
    early_registry, late_registry = (ConsulRegistry(url, token=one) for one in (token, late))
    try:
        async with asyncio.timeout(20.0):
            # Then the policy exists.
            await early_registry.register(Instance(1, "default", "worker", "", "a:1"))
            with capture_logs() as logs:
                registered = asyncio.create_task(
                    late_registry.register(Instance(2, "default", "worker", "", "a:2"))
                )
                await until(lambda: bool(logs), "a call is refused")
            assert "ACL not found" in logs[0]["error"]
            assert not registered.done()
            async with httpx.AsyncClient(trust_env=False) as http:
                made = await http.put(
                    f"{url}/v1/acl/token",
                    json={"SecretID": late, "Policies": [{"Name": "kvmesh"}]},
                    headers={"x-consul-token": (tmp_path / "management").read_text().strip()},
                )
            assert made.status_code == 200, made.text
            await registered
    finally:
        await early_registry.close()
        await late_registry.close()


@dataclass(frozen=True, slots=True)
class ConsulServer:
    """A server of the compose file's cluster, on an address of this host."""

    address: str
    process: subprocess.Popen[bytes]

    def peers(self, folder: Path) -> dict[str, bool]:
        """Returns the servers of its cluster, and whether each votes; empty without a leader."""
        done = subprocess.run(
            [consul_binary(), "operator", "raft", "list-peers"],
            env={
                "CONSUL_HTTP_ADDR": f"http://{self.address}:8500",
                "CONSUL_HTTP_TOKEN": (folder / "management").read_text().strip(),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.findall(r" (127\.\S+):8300 .* (true|false) ", done.stdout)
        return {address: votes == "true" for address, votes in found}


@contextmanager
def consul_servers(folder: Path) -> Iterator[Callable[[int], ConsulServer]]:
    """Yields what starts the first, second or third server of a cluster."""
    for name in ("management", "service"):
        (folder / name).write_text(f"{uuid.uuid4()}\n")
    number = os.getpid()
    addresses = [f"127.{number >> 8 & 127 | 64}.{number & 255}.{n}" for n in (1, 2, 3)]
    processes = []

    def start(number: int) -> ConsulServer:
        address = addresses[number]
        process = subprocess.Popen(
            [
                *(ROOT / "deploy/consul.sh", folder / "management", folder / "service"),
                *(ROOT / "deploy/consul_policy.hcl", f"-bind={address}", f"-client={address}"),
            ],
            env={
                "PATH": f"{Path(consul_binary()).parent}:/usr/bin:/bin",
                "TMPDIR": str(folder),
                "CONSUL_HTTP_ADDR": f"http://{address}:8500",
                "CONSUL_MANAGEMENT_SETTING": "master",
                "CONSUL_PEERS": " ".join(other for other in addresses if other != address),
                **({} if number == 0 else {"CONSUL_FOUNDS": "no"}),
            },
            stdout=subprocess.DEVNULL,
        )
        processes.append(process)
        return ConsulServer(address, process)

    try:
        yield start
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def _has_peers(
    server: ConsulServer, folder: Path, expected: Collection[str], *, all_vote: bool = True
) -> bool:
    peers = server.peers(folder)
    return peers.keys() == expected and (all(peers.values()) or not all_vote)


@pytest.mark.slow
def test_three_servers_form_one_cluster_of_which_each_may_be_replaced(tmp_path: Path) -> None:
    with consul_servers(tmp_path) as start:
        servers = [start(number) for number in (2, 0, 1)]
        addresses = {server.address for server in servers}
        for server in servers:
            agree = partial(_has_peers, server, tmp_path, addresses)
            wait_for(agree, "the servers vote in one cluster")
        founder = servers[1]
        founder.process.terminate()
        founder.process.wait(30)
        others = addresses - {founder.address}
        wait_for(partial(_has_peers, servers[0], tmp_path, others), "two servers have a leader")
        successor = start(0)
        for server in (successor, servers[0]):
            has_joined = partial(_has_peers, server, tmp_path, addresses, all_vote=False)
            wait_for(has_joined, "the successor joins the cluster")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "their folders are removed"


def test_every_folder_that_the_dockerfile_copies_is_there() -> None:
    copies = re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile(), re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    for source in sources:
        assert (ROOT / source).exists(), source
    compiled = load(ROOT / "tools/compile.py").GROUPS.values()
    assert {path.split("/")[0] for group in compiled for path in group} <= sources


def test_status_runs_with_the_variables_of_the_images(tmp_path: Path) -> None:
    variables = dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", stages()["base"]))
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
