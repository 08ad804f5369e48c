"""What doctor reads on this host: settings of services, processes, folders, files of secrets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from common.registry.file import FileRegistry
from common.registry.instances import METRICS_META_KEY, Instance
from common.runtime.config import ServiceConfig
from meshctl.doctor.checks.host import check_ports
from meshctl.doctor.collect import collect
from meshctl.doctor.collect.certificates import read_certificates
from meshctl.doctor.collect.frontends import read_frontend
from meshctl.doctor.collect.host import is_local, read_folder, read_secret_file
from meshctl.doctor.collect.processes import (
    describe_command,
    find_listeners,
    read_process,
    read_settings,
)
from meshctl.doctor.collect.registry import read_registry
from meshctl.doctor.collect.settings import (
    Planned,
    Settings,
    fixed_ports,
    of_environment,
    record_folders,
    secret_files,
)
from meshctl.doctor.collect.supervisor import read_supervisor
from meshctl.doctor.facts import Limits, ServiceFacts, SupervisorFacts
from meshctl.process.control import ControlRequest, control_server
from tests.kit.waiting import WAIT_S, wait_for

ROUTER = ["/usr/bin/python", "-m", "router_svc"]


def test_a_flag_precedes_the_variable_of_the_service_and_this_the_mesh_wide_one() -> None:
    environ = {
        "KVMESH_PORT": "1",
        "KVMESH_HOST": "::1",
        "KVMESH_ROUTER_PORT": "2",
        "KVMESH_ROUTER_HEALTH_PORT": "3",
        "KVMESH_WORKER_STREAM_PORT": "4",
        "OTHER": "5",
    }
    settings = read_settings([*ROUTER, "--port=6", "--metrics-port", "7"], environ)
    assert settings["port"] == "6"
    assert settings["health_port"] == "3"
    assert settings["metrics_port"] == "7"
    assert settings["host"] == "::1"
    assert "stream_port" not in settings


def test_other_programs_have_no_settings() -> None:
    assert read_settings(["/usr/bin/nginx", "--port=6"], {"KVMESH_PORT": "1"}) == {}


def test_a_command_is_described_without_words_that_may_be_secrets() -> None:
    assert describe_command([*ROUTER, "--mesh-token", "secret"]) == "python -m router_svc"
    assert describe_command(["/usr/bin/db", "password"]) == "db"
    assert describe_command(["python3", "serve.py", "password"]) == "python3 serve.py"
    assert describe_command([]) == "a process of another user"


def test_services_of_an_environment_have_its_mesh_wide_settings_and_their_own() -> None:
    environ = {"KVMESH_TLS_KEY_PATH": "all.key", "KVMESH_ROUTER_TLS_KEY_PATH": "router.key"}
    by_path = {str(path): setting for path, setting, _ in secret_files(of_environment(environ))}
    assert by_path == {
        "all.key": "KVMESH_TLS_KEY_PATH",
        "router.key": "KVMESH_ROUTER_TLS_KEY_PATH",
    }


def test_fixed_ports_have_the_host_that_their_service_binds() -> None:
    environ = {
        "KVMESH_HOST": "::1",
        "KVMESH_FRONTEND_HTTP_PORT": "80",
        "KVMESH_FRONTEND_HTTP_HOST": "0.0.0.0",
        "KVMESH_ROUTER_PORT": "81",
        "KVMESH_WORKER_PORT": "tcp://10.0.0.1:82",  # Injected by Kubernetes.
        "KVMESH_INDEXER_PORT": "0",
    }
    assert set(fixed_ports(of_environment(environ))) == {
        (80, "0.0.0.0", "KVMESH_FRONTEND_HTTP_PORT"),
        (81, "::1", "KVMESH_ROUTER_PORT"),
    }


def test_folders_of_records_are_relative_to_the_process() -> None:
    settings = Settings({"audit_log": "logs/audit.jsonl"}, {}, Path("/srv"))
    assert list(record_folders([settings])) == [Path("/srv/logs")]


def test_the_process_that_listens_on_a_port_is_found_with_its_state() -> None:
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
        " print(s.getsockname()[1], flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            assert find_listeners([port, 1]) == {port: process.pid}
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            found = read_process(process.pid)
        finally:
            process.kill()
    assert found is not None
    assert (found.state, found.command) == ("T", Path(sys.executable).name)
    assert found.descriptors
    assert found.descriptor_limit
    wait_for(lambda: read_process(process.pid) is None, "it has ended", WAIT_S)


async def test_of_two_live_instances_with_one_name_the_newer_one_is_the_member(
    tmp_path: Path,
) -> None:
    registry = FileRegistry(tmp_path)
    try:
        for number in (1, 2):
            address = f"127.0.0.1:{number}"
            await registry.register(Instance(number, "default", "router", "name", address))
        config = ServiceConfig(registry_path=tmp_path)
        facts, members = await read_registry(config, WAIT_S)
    finally:
        await registry.close()
    assert [instance.id for instance in members] == [2]
    assert [instance.id for instance in facts.superseded] == [1]
    assert (facts.foreign, facts.orphans, facts.unreadable) == ((), (), ())


async def test_a_metrics_port_that_a_member_advertises_is_of_the_mesh(tmp_path: Path) -> None:
    """The process of a member of another user is not known: its address has no listener here."""
    registry = FileRegistry(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as metrics:
        port = metrics.getsockname()[1]
        meta = {METRICS_META_KEY: f"http://127.0.0.1:{port}/metrics"}
        try:
            await registry.register(
                Instance(1, "default", "router", "name", "127.0.0.1:1", meta=meta)
            )
            config = ServiceConfig(registry_path=tmp_path)
            environ = {"KVMESH_ROUTER_METRICS_PORT": str(port)}
            limits = Limits(answer_s=0.2)
            facts = await collect(config, environ, limits, tmp_path / "logs", Planned())
        finally:
            await registry.close()
    assert [(found.port, found.is_of_mesh) for found in facts.ports] == [(port, True)]
    assert list(check_ports(facts)) == []


def test_a_folder_that_does_not_exist_yet_counts_as_the_one_above_it(tmp_path: Path) -> None:
    facts = read_folder(tmp_path / "run" / "registry", "registry")
    assert (facts.path, facts.write_error) == (tmp_path, "")
    assert facts.free_mb is not None


def test_a_file_of_keys_is_parsed_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("secret")
    path.chmod(0o640)
    assert read_secret_file(path, "--mesh-token-file", has_keys=False).mode == 0o640
    assert "invalid API keys" in read_secret_file(path, "--api-keys", has_keys=True).error
    assert read_secret_file(tmp_path / "none", "--api-keys", has_keys=True).mode is None


def test_a_certificate_that_is_no_pem_or_absent_has_an_error(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    settings = [
        Settings({"tls_cert_path": name}, {}, tmp_path) for name in ("cert.pem", "absent.pem")
    ]
    no_pem, absent = read_certificates(settings)
    assert "no PEM" in no_pem.error
    assert "No such file" in absent.error


async def test_the_services_of_a_supervisor_are_read_from_its_socket(tmp_path: Path) -> None:
    assert await read_supervisor(tmp_path, WAIT_S) == SupervisorFacts()
    row = {"name": "worker-0", "state": "waiting", "failures": 2, "error": "no memory"}

    async def handle(request: ControlRequest, *_: object) -> object:
        return [row]

    async with control_server(tmp_path, handle):
        facts = await read_supervisor(tmp_path, WAIT_S)
    assert facts == SupervisorFacts((ServiceFacts("worker-0", "waiting", 2, "no memory"),))


async def test_a_supervisor_that_does_not_answer_delays_by_the_limit_only(tmp_path: Path) -> None:
    async def handle(*_: object) -> object:
        await asyncio.Event().wait()
        return []

    async with control_server(tmp_path, handle):
        facts = await read_supervisor(tmp_path, 0.05)
    assert facts.error == "it did not answer within 0.05 s"


def test_loopback_addresses_and_own_ones_are_local() -> None:
    assert is_local("127.0.0.1")
    assert is_local(socket.gethostbyname(socket.gethostname()))
    assert not is_local("192.0.2.1")


async def test_models_whose_canaries_fail_are_read_from_a_frontend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canaries = {
        "good": {"status": "ok", "stage": "", "reason": "", "age_s": 1.0},
        "bad": {"status": "failing", "stage": "token", "reason": "lost", "age_s": None},
    }
    body = {"ready": True, "reasons": [], "degraded": [], "canaries": canaries}
    response = httpx.Response(200, json=body)
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(lambda _: response))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client())
    instance = Instance(1, "default", "frontend", "", "127.0.0.1:1", http_address="127.0.0.1:2")
    facts = await read_frontend(instance, WAIT_S)
    assert (facts.is_ready, facts.failing_models) == (True, {"bad": "stage token: lost"})
