"""Checks of dashboards and alerts on real programs: `python -m tests.dashboards [PART ...]`.

Parts: `static` (names, generated files), `promtool` (each alert fires and resolves in a test),
`panels` (each query on a Prometheus that scrapes a mesh under load), `faults` (alerts on a mesh
that is broken on purpose). Grafana itself is not run: what is checked is what it would query.

The last line is JSON with the numbers of checks that passed, failed, and were skipped: queries that
may have no data, with the reason above. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.dashboards.faults import check_faults
from tests.dashboards.panels import check_panels
from tests.dashboards.prometheus import INSTALL, missing_programs
from tests.dashboards.report import Report
from tools.dashboards.alerts.rules import ALERTS
from tools.dashboards.files import FOLDER, ROOT

STATIC_TESTS = "tests/unit/test_dashboards.py"


def check_static(report: Report) -> None:
    """The generated files are current, and their queries name what the code has."""
    command = [sys.executable, "-m", "pytest", "-q", STATIC_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report.check(STATIC_TESTS, done.returncode == 0, done.stdout[-2000:])


def check_promtool(report: Report) -> None:
    """Each alert is silent, fires and resolves in a test of promtool."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "`missing_programs` was called before"
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        command = [promtool, *arguments]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        report.check(f"promtool {' '.join(arguments)}", done.returncode == 0, output[-4000:])
    report.note("alerts", len(ALERTS))


def main() -> int:
    """Returns the exit status."""
    parts: dict[str, Callable[[Path, Report], None]] = {
        "static": lambda _, report: check_static(report),
        "promtool": lambda _, report: check_promtool(report),
        "panels": check_panels,
        "faults": check_faults,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="default: all")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    arguments = parser.parse_args()
    report, began = Report(), time.monotonic()
    if missing := missing_programs():
        report.check("programs", False, f"{', '.join(missing)} not found; as root: {INSTALL}")
    else:
        folder = Path(tempfile.mkdtemp(prefix="kvmesh-dashboards-"))
        print(f"logs: {folder}", flush=True)
        for name in arguments.parts or parts:
            report.run(name, partial(parts[name], folder / name, report))
        if not arguments.keep and not report.failed:
            shutil.rmtree(folder)
    report.note("seconds", round(time.monotonic() - began))
    print(report.line())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
