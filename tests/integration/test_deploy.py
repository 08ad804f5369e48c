"""The files of `docker compose up`, checked without a container engine."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from common.runtime.config import read_config
from frontend_svc.config import FrontendConfig

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(sys.executable).parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
METRIC = re.compile(r"\bkvmesh_[a-z_]+")


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
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    targets = {s["build"]["target"] for s in services.values() if "build" in s}
    assert targets == {"frontend", "router", "indexer", "worker"}
    assert targets <= set(re.findall(r"^FROM base AS (\w+)$", dockerfile, re.MULTILINE))


def test_ports_are_published_on_this_host_only() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to other hosts"


def test_the_frontend_of_the_compose_file_accepts_its_configuration() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    variables = dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", dockerfile))
    for name, value in COMPOSE["services"]["frontend"]["environment"].items():
        variables[name] = re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
    # deploy/serve.sh sets the flag.
    config, _ = read_config(FrontendConfig, "FRONTEND", variables, ["--advertise-host=frontend"])
    assert config.http_host == "0.0.0.0"


def test_every_file_that_a_service_mounts_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            assert (ROOT / volume.split(":")[0]).exists(), volume


def test_every_folder_that_the_dockerfile_copies_is_there() -> None:
    for source in re.findall(
        r"^COPY (\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE
    ):
        assert (ROOT / source).exists(), source


def test_status_runs_with_the_variables_of_the_images(tmp_path: Path) -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    variables = dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", dockerfile))
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
