"""`meshctl up -f`: the example starts, its members are drained and started, adapters are served."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshctl.process.control import request
from tests.kit.certificates import Authority
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

READY_S = 90.0


class Up:
    """A running `meshctl up` in a folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.out = folder / "up.log"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshctl", "up", *flags],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.out.read_text()
            return " is served" in self.out.read_text()

        wait_for(is_ready, "the mesh is ready", READY_S)

    def meshctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "meshctl", *arguments],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=READY_S,
            check=False,
        )

    # Any: JSON.
    def members(self) -> list[dict[str, Any]]:
        """Returns what the control socket reports."""
        answers = list(request(self.folder / ".run/logs", {"command": "status"}))
        members: list[dict[str, Any]] = answers[-1]["done"]
        return members

    def url(self) -> str:
        """Address of the first frontend."""
        for line in self.out.read_text().splitlines():
            if "  frontend-0 " in line and "http http" in line:
                return "http" + line.rpartition("http http")[2].partition(",")[0]
        raise AssertionError(self.out.read_text())


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    return {**inherited, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[Up]:
    mesh = Up(folder, *flags)
    try:
        mesh.wait_ready()
        yield mesh
    finally:
        mesh.process.send_signal(signal.SIGTERM)
        try:
            mesh.process.wait(READY_S)
        finally:
            mesh.process.kill()


def test_the_example_starts_and_its_members_are_drained_and_started(tmp_path: Path) -> None:
    file = str(ROOT / "deploy" / "mesh.yaml")
    with running(tmp_path, "-f", file, "--http-port", "0") as mesh:
        assert "2 frontends, 2 routers, 2 indexers, 2 workers (sim)" in mesh.out.read_text()
        drained = mesh.meshctl("drain", "worker-1")
        assert drained.returncode == 0, drained.stderr
        assert drained.stdout.splitlines()[-1].startswith("worker-1      drained ")
        health = httpx.get(f"{mesh.url()}/health", trust_env=False).json()
        assert [i["name"] for i in health["instances"] if i["service"] == "worker"] == ["worker-0"]
        refused = mesh.meshctl("drain", "worker-0", "--json")
        assert refused.returncode == 1
        assert "worker-0 is the last live aggregated worker of sim" in refused.stderr
        assert json.loads(refused.stdout)["error"] in refused.stderr
        started = mesh.meshctl("start", "worker-1")
        assert started.returncode == 0, started.stderr
        health = httpx.get(f"{mesh.url()}/health", trust_env=False).json()
        names = [i["name"] for i in health["instances"] if i["service"] == "worker"]
        assert sorted(names) == ["worker-0", "worker-1"]
        # The port of a drained frontend refuses connections until the frontend is started.
        url = mesh.url()
        assert mesh.meshctl("drain", "frontend-0").returncode == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/live", trust_env=False)
        started = mesh.meshctl("start", "frontend-0")
        assert started.returncode == 0, started.stderr
        assert httpx.get(f"{url}/live", trust_env=False).status_code == 200
        scaled = mesh.meshctl("scale", "worker=3", "frontend=3")
        assert scaled.returncode == 0, scaled.stderr
        health = httpx.get(f"{url}/health", trust_env=False).json()
        live = {i["name"] for i in health["instances"] if i["service"] == "worker"}
        assert live == {"worker-0", "worker-1", "worker-2"}
        (third,) = [m for m in mesh.members() if m["name"] == "frontend-2"]
        assert httpx.get(f"{third['addresses']['http']}/ready", trust_env=False).status_code == 200
        scaled = mesh.meshctl("scale", "worker=1", "frontend=2", "--json")
        assert scaled.returncode == 0, scaled.stderr
        health = httpx.get(f"{url}/health", trust_env=False).json()
        live = {i["name"] for i in health["instances"] if i["service"] == "worker"}
        assert live == {"worker-0"}
        refused = mesh.meshctl("scale", "wrker=3")
        assert refused.returncode == 1
        assert "'wrker': no such group; did you mean worker?" in refused.stderr
        assert mesh.meshctl("down").returncode == 0
        assert mesh.process.wait(READY_S) == 0, mesh.out.read_text()
    assert mesh.process.returncode == 0, mesh.out.read_text()


def test_a_restart_uses_the_settings_and_adapters_that_the_file_has_now(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    text = "frontends: {http_port: 0}\nindexers: {count: 0}\nworkers: [{count: 1}]\n"
    path.write_text(text)
    with running(tmp_path, "-f", "mesh.yaml") as mesh:
        url = mesh.url()
        path.write_text(f"{text}adapters: [{{name: support, modle: sim}}]\n")
        refused = mesh.meshctl("restart", "--wait", "worker")
        assert refused.returncode == 1
        assert "mesh.yaml:4:28: adapters[0].modle: no such key" in refused.stderr
        sales = "{name: sales, model: sim, copies: 1}"
        path.write_text(f"{text}adapters: [{{name: support, model: sim}}, {sales}]\n")
        done = mesh.meshctl("restart", "--wait", "worker")
        assert done.returncode == 0, done.stderr
        body = {"model": "support", "prompt": "Hello", "max_tokens": 4}
        reply = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
        assert reply.status_code == 200, reply.text
        listed = f"{url}/v1/models/sales"
        wait_for(
            lambda: httpx.get(listed, trust_env=False).status_code == 200,
            "the worker has loaded it",
        )
        # Without the flag --wait, the restart of the frontend goes on alone. Its address stays.
        assert mesh.meshctl("restart", "frontend").returncode == 0
        wait_for(lambda: "replaced" in mesh.out.read_text().rpartition("frontend-0")[2], "replaced")
        reply = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
        assert reply.status_code == 200, reply.text


def test_certificates_of_the_groups_suffice_if_the_file_names_the_authority_for_all(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "tls")
    cert, key = authority.issue("member")
    own = f"{{settings: {{tls_cert_path: {cert}, tls_key_path: {key}}}"
    shared = f"settings: {{tls_ca_path: {authority.ca}}}\n"
    groups = f"routers: {own}}}\nindexers: {{count: 0}}\nworkers: [{own}}}]\n"
    path = tmp_path / "mesh.yaml"
    path.write_text(f"{shared}frontends: {{http_port: 0}}\n{groups}")
    check = Up(tmp_path, "-f", "mesh.yaml", "--check")
    assert check.process.wait(READY_S) == 2
    refused = check.out.read_text()
    assert refused.startswith("mesh.yaml: frontend-0: --tls-cert-path: set all of"), refused
    # For the name that clients use, from an authority of theirs: not for the address of this host.
    http_cert, http_key = Authority(tmp_path / "public").issue("api", ["DNS:api.example"])
    https = f"http_tls_cert_path: {http_cert}, http_tls_key_path: {http_key}"
    frontends = f"{own.removesuffix('}')}, {https}}}, http_port: 0}}"
    path.write_text(f"{shared}frontends: {frontends}\n{groups}")
    with running(tmp_path, "-f", "mesh.yaml", "--sample") as mesh:
        assert mesh.url().startswith("https://")
        wait_for(lambda: "> Say hello" in mesh.out.read_text(), "the sample is sent")
        # It calls the members itself, to see whether they are routable.
        done = mesh.meshctl("restart", "--wait", "router")
        assert done.returncode == 0, done.stderr
    assert "sample request failed" not in mesh.out.read_text()


def test_a_certificate_of_another_role_is_named_before_anything_starts(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    paths = f"tls_ca_path: {authority.ca}, tls_role_domain: mesh.test"
    text = ""
    for role, section in (("operator", ""), ("frontend", "frontends"), ("router", "routers")):
        cert, key = authority.issue(role, [f"DNS:{role}.mesh.test"])
        own = f"settings: {{tls_cert_path: {cert}, tls_key_path: {key}"
        text += f"{section}: {{{own}}}}}\n" if section else f"{own}, {paths}}}\n"
    path = tmp_path / "mesh.yaml"
    path.write_text(f"{text}indexers: {{count: 0}}\nbatches: {{count: 1}}\n")
    mesh = Up(tmp_path, "-f", "mesh.yaml", "--check")
    assert mesh.process.wait(READY_S) == 2
    problems = mesh.out.read_text().splitlines()
    assert len(problems) == 2, problems
    for service in ("worker", "batch"):
        assert any(
            f"operator.mesh.test; its role here needs the name {service}." in one
            for one in problems
        )


def test_a_problem_of_the_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mesh.yaml").write_text("routers:\n  settings: {queue_treshold: 2}\n")
    mesh = Up(tmp_path, "-f", "mesh.yaml", "--check")
    assert mesh.process.wait(READY_S) == 2
    assert mesh.out.read_text() == (
        "mesh.yaml:2:14: routers.settings.queue_treshold: no such setting; did you mean"
        " queue_threshold?\n"
    )
    (tmp_path / "mesh.yaml").write_text("routers:\n  settings: {queue_threshold: 2}\n")
    mesh = Up(tmp_path, "-f", "mesh.yaml", "--check")
    assert mesh.process.wait(READY_S) == 0
    assert mesh.out.read_text() == "mesh.yaml: 5 processes, no problem\n"
