"""A service that cannot start logs one line that names the setting or the address at fault."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.service_process import PROCESS_S


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of 127.0.0.1 that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def run_until_exit(
    service: str, folder: Path, *flags: str, descriptors: int | None = None
) -> tuple[int, str]:
    """The exit status and stderr.

    - descriptors: the hard limit of open files.
    """
    limit = [] if descriptors is None else ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
    command = [sys.executable, "-m", f"{service}_svc", f"--registry-path={folder}/registry"]
    done = subprocess.run(
        [*limit, *command, *flags],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    return done.returncode, done.stderr


Flags = Callable[[int, Path], list[str]]

OPERATOR_ERRORS: list[tuple[str, Flags, str]] = [
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
@pytest.mark.parametrize(("service", "flags", "message"), OPERATOR_ERRORS)
def test_an_operator_error_is_one_log_line_that_names_the_flag(
    service: str, flags: Flags, message: str, taken: int, tmp_path: Path
) -> None:
    status, errors = run_until_exit(service, tmp_path, *flags(taken, tmp_path))
    assert status == 1, errors
    assert "Traceback" not in errors
    (line,) = [line for line in map(json.loads, errors.splitlines()) if "error" in line]
    assert line["event"] == "start_failed"
    assert message in line["error"]


@pytest.mark.slow
def test_a_failing_selector_factory_is_a_configuration_error(tmp_path: Path) -> None:
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
    assert "--selector: 'odd_selector:make' failed: ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_a_model_folder_without_a_model_is_a_configuration_error(
    tmp_path: Path,
) -> None:
    status, errors = run_until_exit("worker", tmp_path, f"--model-path={tmp_path}")
    assert status == 2
    assert f"--model-path: {tmp_path} has no tokenizer.json and no tokenizer_config.json" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "descriptors", "needed"),
    [
        *((service, 64, 256) for service in ("indexer", "router", "worker", "frontend")),
        ("frontend", 512, 1024),
        ("frontend", 1023, 1024),
    ],
)
def test_a_service_without_descriptors_to_serve_does_not_start(
    service: str, descriptors: int, needed: int, tmp_path: Path
) -> None:
    status, errors = run_until_exit(service, tmp_path, descriptors=descriptors)
    assert status == 2, errors
    assert "Traceback" not in errors
    (line,) = [line for line in map(json.loads, errors.splitlines()) if "error" in line]
    assert line["error"].startswith(
        f"ulimit -n: the hard limit of file descriptors is {descriptors}, and a service needs at "
        f"least {needed}"
    )
    assert "raise it" in line["error"]


@pytest.mark.slow
@pytest.mark.parametrize("service", ["indexer", "router", "worker", "frontend"])
def test_a_service_raises_its_soft_limit_of_descriptors(service: str, tmp_path: Path) -> None:
    ready, child_end = os.pipe()
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    flags = ["--http-port=0"] if service == "frontend" else []
    process = subprocess.Popen(
        [
            *("sh", "-c", f'ulimit -Sn 128; ulimit -Hn {hard}; exec "$@"', "sh"),
            *(sys.executable, "-m", f"{service}_svc", f"--registry-path={tmp_path}/registry"),
            *(f"--ready-fd={child_end}", *flags),
        ],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        stderr=subprocess.PIPE,
        pass_fds=[child_end],
    )
    os.close(child_end)
    try:
        with os.fdopen(ready) as pipe:
            assert "addresses" in json.loads(pipe.readline())
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        process.kill()
        process.communicate(timeout=PROCESS_S)
