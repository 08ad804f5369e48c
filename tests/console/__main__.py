"""`make console-test`: the console of a real mesh in Chromium. The last line is JSON.

Screenshots are in build/console/. Exit status: 1 if a journey fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from tests.console.browser import CHROMIUM, INSTALL, WAIT_MS, Chromium
from tests.console.journeys import JOURNEYS, Visit, look_at_a_thousand_workers
from tests.console.mesh import BIN, ROOT, ConsoleMesh, Process, free_port, wait_for

LOAD_S = 6.0
LARGE_WORKERS = 1000


class Report:
    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def run(self, name: str, journey: Callable[[], None]) -> None:
        """Runs a journey, prints its result, and counts it."""
        begun = time.monotonic()
        try:
            journey()
        except Exception:
            self.failed.append(name)
            sys.stdout.write(f"FAILED {name}\n{traceback.format_exc()}\n")
        else:
            self.passed.append(name)
            sys.stdout.write(f"passed {name} ({time.monotonic() - begun:.1f} s)\n")
        sys.stdout.flush()

    def line(self) -> str:
        return json.dumps(
            {
                "passed": len(self.passed),
                "failed": len(self.failed),
                "skipped": 0,
                "failures": self.failed,
            }
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make console-test", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "console")
    parser.add_argument("--chromium", type=Path, default=CHROMIUM)
    parser.add_argument("names", nargs="*", help="journeys to run; default: all")
    arguments = parser.parse_args()
    report = Report()
    if not arguments.chromium.exists():
        sys.stdout.write(f"{arguments.chromium} is missing: {INSTALL}\n")
        report.failed.append("chromium")
        sys.stdout.write(f"{report.line()}\n")
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        chromium = Chromium(playwright, arguments.chromium)
        try:
            _run_mesh(chromium, arguments, report)
            if not arguments.names or "large" in arguments.names:
                report.run(
                    "look_at_a_thousand_workers", partial(_run_large, chromium, arguments.out)
                )
        finally:
            chromium.close()
    sys.stdout.write(f"{report.line()}\n")
    return 1 if report.failed else 0


def _run_mesh(chromium: Chromium, arguments: argparse.Namespace, report: Report) -> None:
    journeys = [j for j in JOURNEYS if not arguments.names or j.__name__ in arguments.names]
    if not journeys:
        return
    # Short, for the paths of sockets.
    with tempfile.TemporaryDirectory(prefix="kvmesh-console-") as folder:
        mesh = ConsoleMesh(Path(folder))
        try:
            mesh.wait_ready()
            mesh.begin_load()
            # Sleep: pages show what happened within seconds.
            time.sleep(LOAD_S)
            for journey in journeys:
                report.run(journey.__name__, partial(journey, Visit(chromium, mesh, arguments.out)))
            answered = mesh.answered
        finally:
            mesh.stop()
            _keep_logs(Path(folder), arguments.out / "logs")
    report.run("the_load_was_served", partial(_check_load, answered))


def _keep_logs(folder: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    for log in folder.rglob("*.log"):
        shutil.copy(log, out)


def _check_load(answered: int) -> None:
    assert answered > 20, f"only {answered} requests of the load succeeded"


def _run_large(chromium: Chromium, out: Path) -> None:
    """Serves the pages of a thousand workers, and looks at them."""
    import os
    import urllib.request

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"}
    command = [str(BIN / "python"), "-m", "tests.console.large_mesh"]
    command += ["--port", str(port), "--workers", str(LARGE_WORKERS)]
    with tempfile.TemporaryDirectory(prefix="kvmesh-console-") as folder:
        process = Process(command, Path(folder) / "large.log", environ)

        def serves() -> bool:
            process.check_runs()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return True
            except OSError:
                return False

        try:
            wait_for("the pages of the large mesh are served", serves, 30)
            look_at_a_thousand_workers(chromium, url, out)
        finally:
            process.stop()


if __name__ == "__main__":
    raise SystemExit(main())
