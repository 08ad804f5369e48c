"""The units of `meshctl export systemd`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from common.runtime.config import read_config
from frontend_svc.config import FrontendConfig
from meshctl.commands.export import export_systemd
from meshctl.mesh_file.load import read_mesh_file
from meshctl.options import UpOptions
from meshctl.services import build_service_specs
from meshctl.systemd_units import Host, build_units

MESH = (
    "routers: {count: 2}\n"
    "workers:\n"
    "  - settings: {taints: 'a b'}\n"
    "    environment: {KEY: 'a \"quoted\" $value'}\n"
)


def units(tmp_path: Path, **options: object) -> dict[str, str]:
    path = tmp_path / "mesh.yaml"
    path.write_text(MESH)
    mesh = UpOptions.model_validate({"routers": 2, **options})
    host = Host("/opt/py thon", Path("/srv/100%"), tmp_path, "mesh", "127.0.0.1", {})
    return build_units(build_service_specs(mesh, read_mesh_file(path).mesh), host)


def parsed(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_each_member_has_a_unit_that_the_target_starts(tmp_path: Path) -> None:
    files = units(tmp_path)
    services = {name for name in files if name.endswith(".service")}
    members = ("frontend-0", "router-0", "router-1", "indexer-0", "worker-0")
    assert services == {f"kvmesh-{name}.service" for name in members}
    assert set(parsed(files["kvmesh.target"])["Unit"]["Wants"].split()) == services
    for name in services:
        unit = parsed(files[name])
        assert unit["Service"]["User"] == "mesh"
        assert unit["Service"]["Restart"] == "always"
        assert unit["Service"]["KillSignal"] == "SIGTERM"
        # Notice, drain and the other steps, and a margin.
        assert int(unit["Service"]["TimeoutStopSec"]) > 0.3 + 10 + 10
        assert unit["Install"]["WantedBy"] == "kvmesh.target"


def test_a_unit_runs_the_flags_and_variables_of_its_member(tmp_path: Path) -> None:
    files = units(tmp_path)
    unit = parsed(files["kvmesh-worker-0.service"])["Service"]
    words = shlex.split(unit["ExecStart"])
    assert words[:3] == ["/opt/py thon", "-m", "worker_svc"]
    assert "--stable-name" in words
    assert unit["WorkingDirectory"] == "/srv/100%%"
    variables = dict(line.split("=", 1) for line in files["kvmesh-worker-0.env"].splitlines())
    assert variables["KVMESH_WORKER_TAINTS"] == '"a b"'
    assert variables["KEY"] == '"a \\"quoted\\" \\$value"'


def test_a_service_that_sends_work_stops_before_those_that_receive_it(tmp_path: Path) -> None:
    # systemd stops in the reverse order of After=.
    files = units(tmp_path)
    frontend = parsed(files["kvmesh-frontend-0.service"])["Unit"]["After"].split()
    assert {"kvmesh-router-0.service", "kvmesh-worker-0.service"} <= set(frontend)
    router = parsed(files["kvmesh-router-0.service"])["Unit"]["After"].split()
    assert "kvmesh-worker-0.service" in router
    assert "kvmesh-frontend-0.service" not in router


def test_systemd_keeps_the_socket_of_a_frontend(tmp_path: Path) -> None:
    files = units(tmp_path)
    assert parsed(files["kvmesh-frontend-0.socket"])["Socket"]["ListenStream"] == "127.0.0.1:8000"
    unit = parsed(files["kvmesh-frontend-0.service"])
    assert unit["Unit"]["Requires"] == "kvmesh-frontend-0.socket"
    args = shlex.split(unit["Service"]["ExecStart"])[3:]
    config, _ = read_config(FrontendConfig, "FRONTEND", {}, args)
    assert config.http_fd == (3,)
    assert "kvmesh-frontend-0.socket" not in units(tmp_path, http_port=0)


def test_files_with_variables_are_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = UpOptions()
    specs = build_service_specs(options)
    environ = {"KVMESH_MESH_TOKEN": "secret", "OTHER": "x"}
    folder = tmp_path / "units"
    assert export_systemd(options, specs, environ, folder, user="mesh") == 0
    path = folder / "kvmesh-router-0.env"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == 'KVMESH_MESH_TOKEN="secret"\n'
    assert "systemctl enable --now kvmesh.target" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    options = UpOptions()
    export_systemd(options, build_service_specs(options), {}, tmp_path, user="root")
    paths = [str(path) for path in tmp_path.iterdir() if path.suffix != ".env"]
    done = subprocess.run(
        ["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sys.executable
