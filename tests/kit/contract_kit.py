"""The contract kit of engines, run on a server that an adapter serves."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.kit.processes import ROOT
from worker_svc.conformance.checks import all_checks


def check_server(url: str, *arguments: str) -> None:
    """Raises AssertionError unless all cases pass. arguments: more of the engine, as NAME=VALUE."""
    command = [sys.executable, "-m", "worker_svc.conformance"]
    command.append("worker_svc.engines.openai.engine:ServerEngine")
    command += [f"--arg={one}" for one in (f"url={url}", *arguments)]
    # A step may be slow on a busy machine.
    command.append("--stop-s=30")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f"{len(all_checks())} pass, 0 fail, 0 skip")
