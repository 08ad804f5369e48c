"""`meshctl doctor` on real meshes, each broken in one way: it names the problem and the remedy.

Tests that break the shared mesh for good are last.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.runtime.build import build_name
from meshctl.cli import run_command
from meshctl.commands.doctor import DoctorConfig, doctor
from tests.contract.consul_agent import ConsulAgent
from tests.e2e.sick_worker import VERSION
from tests.kit.certificates import Authority
from tests.kit.processes import ROOT, Mesh, Service
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

TOKEN = "the token of the mesh, 32 bytes.."
# Of the command on a busy machine.
COMMAND_S = 60.0
# In which it returns, whatever a member does: a few times the limit of a question.
DOCTOR_S = 15.0
ANSWER_S = 2.0

# Any: JSON.
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """The output of one run. status: its exit status."""

    status: int
    content: Json

    def of(self, name: str) -> list[Json]:
        """The findings of a rule."""
        return [finding for finding in self.content["findings"] if finding["name"] == name]

    def only(self, name: str) -> Json:
        """The only finding of a rule."""
        (found,) = self.of(name)
        return found

    def errors(self) -> set[str]:
        return {f["name"] for f in self.content["findings"] if f["severity"] == "error"}


def examine(folder: Path, environ: Mapping[str, str] | None = None, **settings: Any) -> Report:
    """Runs doctor in this process on the registry of a mesh in `folder`."""
    own = {"registry_path": folder / "registry", "log_dir": folder, "answer_s": ANSWER_S}
    config = DoctorConfig.model_validate(own | settings)
    started_at = time.monotonic()
    with redirect_stdout(io.StringIO()) as output:
        status = doctor(config, environ or {}, as_json=True)
    assert time.monotonic() - started_at < DOCTOR_S
    return Report(status, json.loads(output.getvalue()))


def text(finding: Json) -> str:
    return f"{finding['found']} -> {finding['remedy']}"


@pytest.fixture(scope="module")
def mode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the mode of the failing engine of worker-2."""
    path = tmp_path_factory.mktemp("mode") / "mode"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, mode: Path) -> Iterator[Mesh]:
    flags = ["--speedup=0", "--canary-idle-s=0.3"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=1,
        indexers=1,
        worker_flags=[*flags, "--mesh-key=key"],
        router_flags=["--mesh-key=key"],
        frontend_flags=["--mesh-key=key"],
        indexer_flags=["--mesh-key=key"],
    ) as running:
        engine = ["--engine=tests.e2e.failing_engine:make", f"--engine-args={mode}"]
        running.spawn("worker", *engine, "--stable-name=flaky").wait_ready()
        wait_for(running.is_complete, "the frontend uses all workers")
        wait_for(
            lambda: not examine(running.folder).errors(), "doctor finds a healthy mesh healthy"
        )
        yield running


def subject_of(service: Service) -> tuple[str, str]:
    return service.service_name, str(service.instance_id)


def named(finding: Json) -> tuple[str, str]:
    return finding["subject"]["kind"], finding["subject"]["id"]


def test_a_healthy_mesh_has_no_errors_and_status_0(mesh: Mesh) -> None:
    report = examine(mesh.folder)
    assert (report.status, report.errors(), report.content["members"]) == (0, set(), 5)
    assert report.only("python")["severity"] == "note"


def test_a_stopped_frontend_is_named_also_as_the_peer_that_never_acknowledges(
    mesh: Mesh,
) -> None:
    frontend = mesh.frontend
    frontend.send(signal.SIGSTOP)
    try:
        report = examine(mesh.folder)
        worker = mesh.spawn("worker", "--routable-limit-s=3", "--stable-name=new").wait_ready()
        waiting = examine(mesh.folder).only("member_not_routable")
        given_up = wait_for(
            lambda: examine(mesh.folder).of("peer_given_up"), "the worker waits no longer"
        )[0]
    finally:
        frontend.send(signal.SIGCONT)
        worker.close()
    found = report.only("member_stopped")
    assert named(found) == subject_of(frontend)
    assert f"kill -CONT {frontend.pid}" in found["remedy"]
    assert report.status == 1
    assert named(waiting) == named(given_up) == subject_of(worker)
    for finding in (waiting, given_up):
        assert f"frontend {frontend.instance_id}" in finding["found"]
    wait_for(lambda: not examine(mesh.folder).errors(), "it runs again")


def test_a_worker_whose_engine_fails_is_named_with_the_reason(mesh: Mesh, mode: Path) -> None:
    mode.write_text("raise")
    try:
        wait_for(lambda: examine(mesh.folder).of("engine_failing"), "its probe has failed")
        found = examine(mesh.folder).only("engine_failing")
    finally:
        mode.write_text("")
    assert found["subject"]["name"] == "flaky"
    assert "CUDA error" in found["found"]
    assert "restart flaky" in found["remedy"]
    wait_for(lambda: not examine(mesh.folder).errors(), "it is well again")


def test_a_damaged_card_is_named_with_its_model(mesh: Mesh) -> None:
    (card,) = (mesh.folder / "registry/cards").iterdir()
    content = card.read_bytes()
    card.write_bytes(content[:-1])
    try:
        report = examine(mesh.folder)
    finally:
        card.write_bytes(content)
    found = report.only("card_missing")
    assert found["subject"] == {"kind": "model", "name": "sim", "id": ""}
    assert "restart one worker of sim" in found["remedy"]


def test_a_port_of_a_setting_that_another_process_has_is_named_with_the_process(
    mesh: Mesh,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        report = examine(mesh.folder, {"KVMESH_ROUTER_PORT": str(port)})
    found = report.only("port_taken")
    assert (found["subject"]["kind"], found["subject"]["name"]) == ("port", str(port))
    assert f"process {os.getpid()}" in found["found"]
    assert "change KVMESH_ROUTER_PORT" in found["remedy"]
    # A member of the mesh may have it.
    own = mesh.router.address.rpartition(":")[2]
    assert not examine(mesh.folder, {"KVMESH_ROUTER_PORT": own}).of("port_taken")


def test_a_key_file_of_a_running_frontend_that_is_gone_or_readable_is_named(mesh: Mesh) -> None:
    path = mesh.folder / "keys.json"
    with redirect_stdout(io.StringIO()):
        assert run_command(["keys", f"--api-keys={path}", "create", "acme"], {}) == 0
    frontend = mesh.spawn("frontend", f"--api-keys={path}").wait_ready()
    try:
        path.chmod(0o644)
        readable = examine(mesh.folder).only("secret_readable")
        path.unlink()
        missing = examine(mesh.folder)
    finally:
        frontend.close()
    assert (readable["subject"]["name"], readable["severity"]) == (str(path), "warning")
    assert f"chmod 600 {path}" in readable["remedy"]
    assert "--api-keys" in missing.only("secret_missing")["found"]
    assert missing.status == 1


def test_a_worker_with_another_clock_key_version_and_blocks_is_named(mesh: Mesh) -> None:
    flags = [f"--registry-path={mesh.folder / 'registry'}", "--mesh-key=another"]
    sick = Service(
        "worker",
        [*flags, "--stable-name=sick"],
        mesh.folder,
        "sick",
        module="tests.e2e.sick_worker",
    )
    try:
        sick.wait_ready()
        wait_for(lambda: examine(mesh.folder).of("index_drift"), "the indexer has its blocks")
        report = examine(mesh.folder)
    finally:
        sick.close()
    clock = report.only("clock_too_far")
    assert named(clock) == subject_of(sick)
    assert "300.0 s ahead" in clock["found"]
    assert "timedatectl" in clock["remedy"]
    assert "sick" in report.only("hashes_differ")["found"]
    assert "KVMESH_MESH_KEY" in report.only("hashes_differ")["remedy"]
    assert f"{VERSION} {build_name()}: sick" in report.only("versions_differ")["found"]
    assert "replace sick" in report.only("versions_differ")["remedy"]
    assert "1 only there" in report.only("index_drift")["found"]
    assert "restart worker sick" in report.only("index_drift")["remedy"]


def environment() -> dict[str, str]:
    """The environment of a command without settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    return {**inherited, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "protos", ROOT)))}


def isolated(script: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Runs a command after a shell script, with mounts of its own."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    words = [*unshare, "sh", "-c", f'set -e; {script}; exec "$@"', "sh", *map(str, command)]
    return subprocess.run(
        words,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def test_a_read_only_registry_a_full_disk_and_a_low_limit_are_named(mesh: Mesh) -> None:
    if shutil.which("unshare") is None or isolated("mount -t tmpfs x /mnt", "true").returncode:
        pytest.skip("needs mounts of its own: unshare --mount")
    registry, logs = mesh.folder / "registry", mesh.folder / "logs"
    logs.mkdir()
    script = (
        f"mount --bind {registry} {registry}; mount -o remount,ro,bind {registry};"
        f" mount -t tmpfs -o size=64k full {logs}; ulimit -n 600"
    )
    command = ("-m", "meshctl", "doctor", "--json")
    flags = (f"--registry-path={registry}", f"--log-dir={logs}")
    done = isolated(script, sys.executable, *command, *flags)
    report = Report(done.returncode, json.loads(done.stdout))
    assert report.errors() == {"registry_read_only", "disk_full", "descriptors_too_few"}
    assert str(registry) in text(report.only("registry_read_only"))
    assert "mount -o remount,rw" in report.only("registry_read_only")["remedy"]
    full = report.only("disk_full")
    assert full["subject"]["name"] == str(logs)
    assert "0 MB are free, the limit is 512 MB" in full["found"]
    assert "ulimit -Hn is 600" in report.only("descriptors_too_few")["found"]
    assert report.status == 1


def command(*flags: object, **environ: str) -> Report:
    """Runs the command."""
    done = subprocess.run(
        [sys.executable, "-m", "meshctl", "doctor", "--json", *map(str, flags)],
        cwd=ROOT,
        env={**environment(), **environ},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return Report(done.returncode, json.loads(done.stdout))


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVMESH_DRAINS_S", "KVMESH_DRAIN_S"),
        ("KVMESH_ROUTER_QUEUE_TRESHOLD", "KVMESH_ROUTER_QUEUE_THRESHOLD"),
    ],
)
def test_unknown_variables_of_the_mesh_and_of_a_service_are_named(
    variable: str, meant: str, tmp_path: Path
) -> None:
    report = command(f"--registry-path={tmp_path}", **{variable: "3"})
    assert f"did you mean {meant}?" in report.only("setting_invalid")["found"]
    assert f"correct or unset {variable}" in report.only("setting_invalid")["remedy"]
    assert report.status == 1


def test_a_mesh_file_is_checked_with_its_services(mesh: Mesh) -> None:
    path = mesh.folder / "mesh.yaml"
    good = (
        f"registry_path: {mesh.folder / 'registry'}\nlog_dir: {mesh.folder}\n"
        "workers: [{name: flaky, count: 1}]\nrequire: [indexer]\n"
        "routers:\n  settings: {queue_threshold: 2}\n"
    )
    path.write_text(good.replace("queue_threshold", "queue_treshold"))
    found = command("-f", path).only("setting_invalid")["found"]
    assert f"{path}:6:14: routers.settings.queue_treshold: no such setting" in found
    path.write_text(good)
    report = command("-f", path)
    missing = {found["subject"]["name"] for found in report.of("member_missing")}
    assert missing == {"frontend-0", "router-0", "indexer-0", "flaky-0"}
    assert report.content["members"] == 5


@contextmanager
def secured_mesh(folder: Path, authority: Authority) -> Iterator[tuple[Mesh, Json]]:
    """A mesh with mesh token and mutual TLS, and the settings of an operator."""
    flags = {}
    for role in ("frontend", "router", "worker", "operator"):
        cert, key = authority.issue(role, days=60)
        flags[role] = {"tls_cert_path": cert, "tls_key_path": key, "tls_ca_path": authority.ca}
    words = {
        role: [f"--mesh-token={TOKEN}"]
        + [f"--{name.replace('_', '-')}={path}" for name, path in paths.items()]
        for role, paths in flags.items()
    }
    with Mesh(
        folder,
        workers=1,
        worker_flags=words["worker"],
        router_flags=words["router"],
        frontend_flags=words["frontend"],
    ) as mesh:
        yield mesh, {"mesh_token": TOKEN, **flags["operator"]}


def test_tokens_and_certificates_that_do_not_fit_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    folder = tmp_path / "mesh"
    folder.mkdir()
    with secured_mesh(folder, authority) as (mesh, operator):
        healthy = examine(folder, **operator)
        assert not healthy.errors()
        # The authority of the tests is valid for two days.
        assert healthy.only("certificate_ends_soon")["subject"]["name"] == str(authority.ca)

        other_token = examine(
            folder, **{**operator, "mesh_token": "another token of 32 bytes......"}
        )
        foreign = other_token.of("entry_not_of_mesh")
        assert {named(found) for found in foreign} == {subject_of(s) for s in mesh.services}
        assert "KVMESH_MESH_TOKEN" in foreign[0]["remedy"]

        no_token = examine(folder, **{**operator, "mesh_token": None})
        refusing = {named(found) for found in no_token.of("member_refuses")}
        assert refusing == {subject_of(service) for service in mesh.services}
        assert "KVMESH_MESH_TOKEN" in no_token.of("member_refuses")[0]["remedy"]

        no_certificate = examine(folder, mesh_token=TOKEN)
        refusing = {named(found) for found in no_certificate.of("member_refuses")}
        assert refusing == {subject_of(service) for service in mesh.services}
        assert not no_certificate.of("member_silent")

        authority.issue("router", days=-1)
        authority.issue("worker", days=5)
        report = examine(folder, **operator)
        expired = report.only("certificate_expired")
        assert expired["subject"]["name"] == str(authority.folder / "router.pem")
        assert "expired 1.0 days ago" in expired["found"]
        assert "renew" in expired["remedy"]
        soon = {f["subject"]["name"]: f["found"] for f in report.of("certificate_ends_soon")}
        assert "in 5.0 days" in soon[str(authority.folder / "worker.pem")]


def test_a_consul_that_is_unreachable_or_refuses_is_named(tmp_path: Path) -> None:
    absent = examine(tmp_path, registry="consul", consul_url="http://127.0.0.1:1")
    assert "http://127.0.0.1:1" in absent.only("consul_unreachable")["found"]
    assert "KVMESH_CONSUL_URL" in absent.only("consul_unreachable")["remedy"]
    agent = ConsulAgent('-hcl=acl { enabled = true default_policy = "deny" }')
    agent.start()
    try:
        for token in (None, "6b1d5ea6-0000-4000-8000-000000000000"):
            report = examine(tmp_path, registry="consul", consul_url=agent.url, consul_token=token)
            assert "consul_policy.hcl" in report.only("consul_refuses")["remedy"]
            assert report.status == 1
    finally:
        agent.kill()


def test_lost_members_and_entries_of_ended_processes_are_named(mesh: Mesh) -> None:
    (indexer,) = mesh.running("indexer")
    indexer.kill()
    lost = wait_for(lambda: examine(mesh.folder).of("indexer_lost"), "its entry is removed")
    assert "indexer lost" in lost[0]["found"]
    assert "start an indexer" in lost[0]["remedy"]
    path = mesh.folder / "required.yaml"
    path.write_text(f"registry_path: {mesh.folder / 'registry'}\nrequire: [indexer]\n")
    required = command("-f", path).only("role_missing")
    assert "requires the role indexer" in required["found"]

    for worker in mesh.workers:
        worker.kill()
    roles = wait_for(lambda: examine(mesh.folder).of("role_missing"), "theirs are removed")
    assert "start a worker" in roles[0]["remedy"]
    assert examine(mesh.folder).only("frontend_not_ready")

    # Stopped first, so that none removes the entry of another one.
    live = [service for service in mesh.services if service.process.poll() is None]
    for service in live:
        service.send(signal.SIGSTOP)
    for service in live:
        service.kill()
    report = examine(mesh.folder)
    orphans = report.of("entry_orphaned")
    for service in live:
        assert any(f"{service.instance_id:016x}.json has ended" in f["found"] for f in orphans)
    assert report.only("no_members")["severity"] == "warning"
