"""Services that cannot start say why in one line, and name the knob or the address at fault."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.service_process import PROCESS_S


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of 127.0.0.1 that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def not_started(service: str, folder: Path, *flags: str) -> tuple[int, str]:
    """The exit status and what was written to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", f"{service}_svc", f"--registry-path={folder}/registry", *flags],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    return done.returncode, done.stderr


Flags = Callable[[int, Path], list[str]]

MENDABLE: list[tuple[str, Flags, str]] = [
    ("indexer", lambda port, _: [f"--port={port}"], "(--host, --port): Address already in use"),
    ("router", lambda port, _: [f"--health-port={port}"], "(--host, --health-port): Address"),
    ("frontend", lambda port, _: [f"--http-port={port}"], "--http-port"),
    (
        "worker",
        lambda _, folder: [f"--tls-{part}-path={folder}/x.pem" for part in ("cert", "key", "ca")],
        "--tls-cert-path: cannot read",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("service", "flags", "says"), MENDABLE)
def test_what_can_be_mended_is_one_line_that_names_it(
    service: str, flags: Flags, says: str, taken: int, tmp_path: Path
) -> None:
    status, errors = not_started(service, tmp_path, *flags(taken, tmp_path))
    assert status == 1, errors
    assert "Traceback" not in errors
    (line,) = [line for line in map(json.loads, errors.splitlines()) if "error" in line]
    assert line["event"] == "start failed"
    assert says in line["error"]


@pytest.mark.slow
def test_a_router_whose_selector_cannot_be_made_is_not_configured(tmp_path: Path) -> None:
    (tmp_path / "odd_selector.py").write_text("def make():\n    return 1 // 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "router_svc", "--selector=odd_selector:make"],
        env={
            "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)]),
            "PATH": os.environ["PATH"],
            "KVMESH_REGISTRY_PATH": str(tmp_path / "registry"),
        },
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "--selector: 'odd_selector:make' cannot be made: ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_a_worker_whose_model_folder_is_no_model_is_refused_with_its_configuration(
    tmp_path: Path,
) -> None:
    status, errors = not_started("worker", tmp_path, f"--model-path={tmp_path}")
    assert status == 2
    assert f"--model-path: {tmp_path} has no tokenizer.json and no tokenizer_config.json" in errors
