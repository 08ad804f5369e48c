"""Builds the images and runs the compose file in containers, without an image registry.

    python -m tests.compose [--work FOLDER] [--interpreted] [CASE ...]

Needs root on Debian, and the packages that it names. A base image of Debian's packages stands in
for that of Python (BASE names another one), Debian's Consul and Prometheus and a receiver of spans
for the images of registries. Cases: default, minimal, console, batch, gateway, ha; also
sglang, which is run if it is named (3 GB of packages). Prints one JSON line a case; the last line
sums them up:

    errors, inexact    requests that failed; responses that differ from the sim model
    longest_pause_s    longest time in which a client of `ha` received nothing; null: not measured
    passed, failed, skipped   names of checks; failed ones with the reason
    is_compiled        whether the images have compiled modules
    images_mb          sizes, with the base image
    health_cpu_ms      CPU time of one health check, by image
    times_s            builds, starts, replacements

The exit status is 1 if a check failed. Nothing remains but the images, in FOLDER/store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.compose import checks
from tests.compose.engine import (
    ROOT,
    UP_S,
    Engine,
    EngineFailed,
    in_namespaces,
    missing_packages,
    remove_groups,
)
from tests.compose.load import Load, figures

WORK = ROOT / "build" / "compose"
TOTAL_S = 3000.0
DOWN_S = 240.0
FRONTEND_URL, SECOND_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
MESH = ("frontend", "router", "indexer", "prefill", "decode", "decode-2")
SECOND = ("frontend-2", "router-2", "indexer-2", "prefill-2")
STAND_INS = ("collector", "prometheus")
BUILT = ("frontend", "router", "indexer", "worker", "console", "batch", "epp", "mesh")
SGLANG = ("frontend", "router", "indexer", "sglang-prefill", "sglang-decode")
# One of each image, in which the CPU time of the health check is measured.
MEASURED = ("frontend", "router", "indexer", "decode")
SKIPPED = {
    "observe": "images of the collector, Jaeger and Grafana need a registry: configuration checked",
    "sglang": "3 GB of packages: run if it is named; configuration checked",
    "gpu": "SGLang on GPUs is not run: configuration checked",
}


@dataclass(slots=True)
class Report:
    """What the checks of a case have found."""

    name: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    # Any: figures by name.
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, check: Callable[[], Any]) -> Any:
        """Runs a check; returns its result, None if it failed."""
        try:
            result = check()
        except (AssertionError, EngineFailed, OSError, ValueError, LookupError) as error:
            self.failed[f"{self.name}/{name}"] = str(error)[-2000:] or repr(error)
            print(f"{self.name}/{name}: {error}", file=sys.stderr, flush=True)
            return None
        except Exception:
            self.failed[f"{self.name}/{name}"] = traceback.format_exc()[-2000:]
            traceback.print_exc()
            return None
        self.passed.append(f"{self.name}/{name}")
        return result

    def count(self, found: dict[str, Any] | None) -> None:
        """Adds the figures of a load."""
        for name in ("requests", "errors", "inexact"):
            self.figures[name] = self.figures.get(name, 0) + (found or {}).get(name, 0)


@contextmanager
def started(engine: Engine, report: Report, *flags: str, services: Sequence[str]) -> Iterator[bool]:
    """Starts services; yields whether all are healthy. Takes everything down."""
    begun = time.monotonic()

    def up() -> None:
        wait = ("--wait", "--wait-timeout", f"{UP_S:g}")
        command = (*flags, "up", "-d", "--no-build", "--pull=never", *wait, *services)
        engine.compose(*command, timeout_s=UP_S + 60)

    try:
        report.check("up", up)
        is_up = f"{report.name}/up" in report.passed
        report.figures["up_s"] = round(time.monotonic() - begun, 1)
        yield is_up
        if report.failed:
            print(checks.logs_of(engine), file=sys.stderr, flush=True)
    finally:
        begun = time.monotonic()
        command = ("--profile", "*", "down", "--volumes", "--timeout", "45")
        report.check("down", lambda: engine.compose(*command, timeout_s=DOWN_S))
        report.figures["down_s"] = round(time.monotonic() - begun, 1)


def run_default(engine: Engine) -> Report:
    """The services of the default profile, and stand-ins of `observe`."""
    report = Report("default")
    engine.env["KVMESH_OTLP_ENDPOINT"] = "http://collector:4317"
    services = (*MESH, "consul", *STAND_INS)
    with started(engine, report, services=services) as is_up:
        if not is_up:
            return report
        report.check("status", lambda: checks.check_status(engine, "router", len(MESH)))
        report.count(report.check("chats", lambda: checks.check_chats(FRONTEND_URL, 8)))
        report.check("trace", lambda: checks.check_linked_trace(FRONTEND_URL))
        report.check("grpcurl", lambda: checks.check_documented_calls(engine, engine.folder))
        for name, port in (("router", 7100), ("indexer", 7200), ("decode", 7300)):
            address = f"127.0.0.1:{port}"
            report.check(f"refusal/{name}", partial(checks.check_refusal, engine, address))
        report.check("metrics", lambda: checks.check_metrics(len(MESH)))
        report.check("hardening", lambda: checks.check_hardening(engine, MESH))
        _measure_health(engine, report, MEASURED)
    return report


def run_minimal(engine: Engine) -> Report:
    """The whole mesh in one container."""
    report = Report("minimal")
    engine.env.pop("KVMESH_OTLP_ENDPOINT", None)
    with started(engine, report, "--profile", "minimal", services=("mesh",)) as is_up:
        if is_up:
            report.count(report.check("chats", lambda: checks.check_chats(FRONTEND_URL, 4)))
            report.check("hardening", lambda: checks.check_hardening(engine, ("mesh",)))
    return report


def run_console(engine: Engine) -> Report:
    """The services of the default profile with a console, which receives their spans."""
    report = Report("console")
    engine.env["KVMESH_OTLP_ENDPOINT"] = "http://console:8071"
    engine.env["KVMESH_OTLP_HEADERS_FILE"] = "/run/kvmesh/service/otlp_headers"
    services = (*MESH, "consul", "console")
    with started(engine, report, "--profile", "console", services=services) as is_up:
        if is_up:
            report.check("pages", lambda: checks.check_console(engine, FRONTEND_URL, len(MESH)))
            report.check("hardening", lambda: checks.check_hardening(engine, ("console",)))
            _measure_health(engine, report, ("console",))
    engine.env.pop("KVMESH_OTLP_HEADERS_FILE")
    return report


def run_batch(engine: Engine) -> Report:
    """The services of the default profile with a batch service."""
    report = Report("batch")
    engine.env.pop("KVMESH_OTLP_ENDPOINT", None)
    services = (*MESH, "consul", "batch")
    with started(engine, report, "--profile", "batch", services=services) as is_up:
        if is_up:
            report.count(report.check("lines", lambda: checks.check_batch(FRONTEND_URL, 32)))
            report.check("hardening", lambda: checks.check_hardening(engine, ("batch",)))
            _measure_health(engine, report, ("batch",))
    return report


def run_gateway(engine: Engine) -> Report:
    """The services of the default profile with an endpoint picker."""
    report = Report("gateway")
    engine.env.pop("KVMESH_OTLP_ENDPOINT", None)
    services = (*MESH, "consul", "epp")
    with started(engine, report, "--profile", "gateway", services=services) as is_up:
        if is_up:
            report.check("picks", lambda: checks.check_picks("127.0.0.1:9002"))
            report.check("hardening", lambda: checks.check_hardening(engine, ("epp",)))
            _measure_health(engine, report, ("epp",))
    return report


def run_ha(engine: Engine) -> Report:
    """Two of each service and three Consul servers; each container is replaced under load."""
    report = Report("ha")
    engine.env.pop("KVMESH_OTLP_ENDPOINT", None)
    consul = ("consul", "consul-2", "consul-3")
    services = (*MESH, *SECOND, *consul)
    with started(engine, report, "--profile", "ha", services=services) as is_up:
        if not is_up:
            return report
        members = len(MESH) + len(SECOND)
        report.check("status", lambda: checks.check_status(engine, "router-2", members))
        for url in (FRONTEND_URL, SECOND_URL):
            report.count(report.check(f"chats/{url}", partial(checks.check_chats, url, 4)))
        report.check("consul", lambda: checks.check_consul_servers(engine, 3))
        for port in (7101, 7201):
            address = f"127.0.0.1:{port}"
            report.check(f"refusal/{port}", partial(checks.check_refusal, engine, address))
        replaced: dict[str, Any] = {}
        for service in (*MESH, *SECOND, *consul):
            found = report.check(f"replace/{service}", partial(replace, engine, service))
            if found is None:
                continue
            replaced[service] = found
            report.count(found)
            report.check(f"replace/{service}/exact", partial(_check_exact, found))
            if service in consul:
                report.check(f"rejoin/{service}", lambda: checks.check_consul_servers(engine, 3))
        report.figures["replaced"] = replaced
        pauses = [found["longest_pause_s"] for found in replaced.values()]
        report.figures["longest_pause_s"] = max(pauses, default=None)
        report.check("status/after", lambda: checks.check_status(engine, "router-2", members))
    return report


def run_sglang(engine: Engine) -> Report:
    """A prefill and a decode worker with SGLang on the CPU, and the model `tiny`."""
    report = Report("sglang")
    engine.env["KVMESH_OTLP_ENDPOINT"] = "http://collector:4317"
    services = (*SGLANG, "consul", "collector")
    with started(engine, report, "--profile", "sglang", services=services) as is_up:
        if is_up:
            report.check("trace", lambda: checks.check_linked_trace(FRONTEND_URL, "tiny"))
            workers = SGLANG[-2:]
            report.check("hardening", lambda: checks.check_hardening(engine, workers))
            _measure_health(engine, report, workers)
    return report


def replace(engine: Engine, service: str) -> dict[str, Any]:
    """Replaces the container of a service under a small load; returns the figures of the load."""
    load = Load([FRONTEND_URL, SECOND_URL])
    begun = time.monotonic()
    with load.running():
        wait = ("--wait", "--wait-timeout", f"{UP_S:g}")
        flags = ("-d", "--no-build", "--pull=never", "--no-deps", "--force-recreate", *wait)
        engine.compose("--profile", "ha", "up", *flags, service, timeout_s=UP_S + 60)
        took_s = time.monotonic() - begun
    found = {"replaced_s": round(took_s, 1), **figures(load.replies)}
    print(json.dumps({"case": f"ha/replace/{service}", **found}), flush=True)
    return found


def _measure_health(engine: Engine, report: Report, services: Sequence[str]) -> None:
    cpu = report.check("health", lambda: checks.health_cpu_ms(engine, services))
    if cpu:
        report.figures["health_cpu_ms"] = cpu
        report.check("health/cpu", lambda: _check_below(cpu, checks.HEALTH_CPU_MAX_MS))


# Any: figures by name.
def _check_exact(found: dict[str, Any]) -> None:
    assert not found["errors"] + found["inexact"], found


def _check_below(figures_by_name: dict[str, float], limit: float) -> None:
    above = {name: figure for name, figure in figures_by_name.items() if figure >= limit}
    assert not above, f"not below {limit:g}: {above}"


CASES: dict[str, Callable[[Engine], Report]] = {
    "default": run_default,
    "minimal": run_minimal,
    "console": run_console,
    "batch": run_batch,
    "gateway": run_gateway,
    "ha": run_ha,
    "sglang": run_sglang,
}
RUN_BY_DEFAULT = ("default", "minimal", "console", "batch", "gateway", "ha")


def run_cases(engine: Engine, names: Sequence[str]) -> dict[str, Any]:
    """Runs cases in the namespaces of this process; returns their sum."""
    reports = []
    with engine.served():
        engine.podman("rm", "--all", "--force")
        engine.podman("volume", "prune", "--force")
        for name in names:
            report = CASES[name](engine)
            reports.append(report)
            line = {"case": name, **report.figures, "failed": sorted(report.failed)}
            print(json.dumps(line), flush=True)
    pauses = [r.figures.get("longest_pause_s") for r in reports]
    return {
        "errors": sum(report.figures.get("errors", 0) for report in reports),
        "inexact": sum(report.figures.get("inexact", 0) for report in reports),
        "longest_pause_s": max((pause for pause in pauses if pause is not None), default=None),
        "cases": {report.name: report.figures for report in reports},
        "passed": [name for report in reports for name in report.passed],
        "failed": {name: why for report in reports for name, why in report.failed.items()},
        "skipped": {name: why for name, why in SKIPPED.items() if name not in names},
    }


def prepare(engine: Engine, names: Sequence[str], *, is_compiled: bool) -> dict[str, Any]:
    """Builds all images; returns sizes and times."""
    begun = time.monotonic()
    base = engine.base_image()
    times = {"base": round(time.monotonic() - begun, 1)}
    extra = tuple(name for name in names if name == "sglang")
    times |= engine.build(
        base, ("ha", "minimal", "console", "batch", "gateway", *extra), is_compiled=is_compiled
    )
    print(json.dumps({"case": "build", "times_s": times}), flush=True)
    images = (*BUILT, *(f"worker-{name}" for name in extra))
    sizes = {name: engine.image_mb(f"kvmesh/{name}") for name in images}
    return {"times_s": times, "images_mb": {"base": engine.image_mb(base), **sizes}}


def run_in_namespaces(work: Path, names: Sequence[str], *, is_compiled: bool) -> dict[str, Any]:
    """Builds all images and runs the cases; returns the sum. Raises EngineFailed."""
    summary_file = work / "summary.json"
    summary_file.unlink(missing_ok=True)
    prepared = prepare(Engine(work), names, is_compiled=is_compiled)
    command = in_namespaces(["--inside", "--work", str(work), *names])
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=TOTAL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"the cases did not end within {TOTAL_S:g} s") from error
    finally:
        remove_groups()
    if not summary_file.exists():
        raise EngineFailed(f"the cases ended with status {done.returncode}")
    summary: dict[str, Any] = json.loads(summary_file.read_text()) | prepared
    summary["health_cpu_ms"] = {
        service: cpu
        for case in summary["cases"].values()
        for service, cpu in case.pop("health_cpu_ms", {}).items()
    }
    return summary


def main() -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--work", type=Path, default=WORK, help="folder of images and state")
    parser.add_argument(
        "--interpreted", action="store_true", help="do not compile the modules of the images"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work, names = options.work.resolve(), options.cases or RUN_BY_DEFAULT
    if unknown := set(names) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    shutil.rmtree(work / "run", ignore_errors=True)
    if options.inside:
        summary = run_cases(Engine(work), names)
        (work / "summary.json").write_text(json.dumps(summary))
        return 0
    missing = missing_packages()
    if missing:
        packages = " ".join(missing)
        install = f"apt-get install -y --no-install-recommends {packages}"
        print(f"compose-test needs {packages}; install them as root: {install}", file=sys.stderr)
        return 1
    if os.geteuid() != 0:
        print("compose-test needs root: namespaces and overlay mounts", file=sys.stderr)
        return 1
    begun = time.monotonic()
    try:
        summary = run_in_namespaces(work, names, is_compiled=not options.interpreted)
        summary["is_compiled"] = not options.interpreted
    except EngineFailed as error:
        summary = {"errors": None, "inexact": None, "longest_pause_s": None, "cases": {}}
        summary |= {"passed": [], "failed": {"engine": str(error)}, "skipped": SKIPPED}
    summary.setdefault("times_s", {})["total"] = round(time.monotonic() - begun, 1)
    print(json.dumps(summary), flush=True)
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
