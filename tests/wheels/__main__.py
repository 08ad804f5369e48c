"""Installs the package as users do, with and without a C compiler: `python -m tests.wheels`.

Each case makes a new environment and copies the sources, installs by pip, and starts a mesh in an
empty folder, which must serve a request and report its build. Packages come from pip's index.
Prints one JSON line for each case, then the sums. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.runtime.free_ports import free_ports
from tests.kit.processes import MODEL, ROOT
from tests.kit.waiting import wait_for

START_S = 60.0
CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One way to install. build: what must run. by_wheel: builds a wheel first. environ: further
    variables of the installation."""

    name: str
    build: str
    by_wheel: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


CASES = (
    Case("install", "compiled"),
    Case("install-without-compiler", "source", environ={"CC": "/no/compiler"}),
    Case("wheel", "compiled", by_wheel=True),
)


def copy_sources(folder: Path) -> Path:
    """Copies the files that git lists, as `make compiled` does."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def run_case(case: Case, python: str, folder: Path) -> dict[str, Any]:
    """Returns the JSON line of a case."""
    sources = copy_sources(folder / "sources")
    venv = folder / "venv"
    _run([python, "-m", "venv", str(venv)])
    pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    began = time.monotonic()
    if case.by_wheel:
        _run([*pip, "wheel", "--no-deps", "-w", str(folder / "dist"), str(sources)], case.environ)
        (wheel,) = (folder / "dist").iterdir()
        output = _run([*pip, "install", str(wheel)], case.environ)
    else:
        output = _run([*pip, "install", str(sources)], case.environ)
    took_s = time.monotonic() - began
    left = subprocess.run(
        [
            "find",
            str(sources),
            "-name",
            "*.so",
            "-o",
            "-name",
            "*.egg-info",
            "-o",
            "-name",
            "build",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    (said,) = re.findall(r"Successfully installed .*\bkvmesh-[\d.]+\+(\w+)", output)
    empty = folder / "empty"
    empty.mkdir()
    runs = serve(venv / "bin/python", empty)
    failed = [name for name, value in (("said", said), ("runs", runs)) if value != case.build]
    if left:
        failed.append(f"left in the sources: {left[:3]}")
    line = {"case": case.name, "seconds": round(took_s, 1), "said": said, "runs": runs}
    return {**line, "failed": failed}


def serve(python: Path, folder: Path) -> str:
    """Runs a mesh of an installed package; returns the build that it reports."""
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    log = folder / "out"
    with log.open("wb") as file:
        mesh = subprocess.Popen(
            [str(python), "-m", "meshctl", "up", "--workers=1", f"--http-port={port}"],
            cwd=folder,
            env=_environ(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:

        def is_ready() -> bool:
            assert mesh.poll() is None, f"the mesh ended:\n{log.read_text()}"
            try:
                return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_ready, "the mesh is ready", START_S)
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=CALL_S, trust_env=False)
        assert response.status_code == 200, response.text
        build: str = httpx.get(f"{url}/health", trust_env=False).json()["build"]
        return build
    finally:
        os.killpg(mesh.pid, signal.SIGINT)
        mesh.wait(CALL_S)


def _environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment without what would show the installation another tree."""
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("KVMESH_")}
    return {**own, **(more or {})}


def _run(command: list[str], more: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command. Raises RuntimeError with its end if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environ(more), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main(argv: list[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a name or a part of one")
    own = getattr(sys, "_base_executable", sys.executable)
    parser.add_argument("--python", default=own, help="the Python of the environments")
    options = parser.parse_args(argv)
    counts = Counter(passed=0, failed=0)
    for case in CASES:
        if not any(part in case.name for part in options.cases or [""]):
            continue
        with tempfile.TemporaryDirectory(prefix="kvmesh-install-") as folder:
            try:
                line = run_case(case, options.python, Path(folder))
            except (AssertionError, RuntimeError) as error:
                line = {"case": case.name, "failed": [str(error)[-3000:]]}
        counts["failed" if line["failed"] else "passed"] += 1
        print(json.dumps(line), flush=True)
    print(json.dumps(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
