"""Checks the settings of services with their own parsers, in a child process.

The services on disk may be of another version than this process. They check the settings, and what
meshctl adds for its own purposes is left out if they refuse it.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.runtime.config import PREFIX
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh
from meshctl.process import settings_child
from meshctl.process.environment import service_environment
from meshctl.services import ServiceSpec, find_port_problems, process_count

# For the imports of the four configurations on a busy machine.
TIMEOUT_S = 60.0

# The module on disk may be another one when it is needed, or not exist.
_CHILD = inspect.getsource(settings_child)
_SOCKET_FLAG = "--http-fd"
_OTHER_FLAGS = ("--stable-name", "--required-roles")


def check_settings(
    specs: Sequence[ServiceSpec], environ: Mapping[str, str], loaded: LoadedMesh | None = None
) -> list[ServiceSpec]:
    """Returns the services without the flags that their version does not have. Raises MeshFileError
    with the settings that they would refuse.

    loaded: the mesh file that they are from.
    """
    checks = [
        {
            "service": spec.module.removesuffix("_svc"),
            "args": [*spec.args, *_socket_flags(spec, environ)],
            "environ": {
                name: value
                for name, value in spec.with_environ(environ).items()
                if name.startswith(PREFIX)
            },
        }
        for spec in specs
    ]
    found = run_checks(checks, service_environment(environ, "worker_svc"))
    problems = []
    if loaded is not None:
        problems += [loaded.document.problem(at, text) for at, text in find_port_problems(specs)]
    fitting = []
    for spec, of_spec in zip(specs, found, strict=True):
        fitted, others = _fit(spec, of_spec)
        fitting.append(fitted)
        problems += [
            f"{spec.name}: {problem}"
            if loaded is None
            else loaded.place(problem, spec.origins, spec.name)
            for problem in others
        ]
    if problems:
        raise MeshFileError(problems)
    return fitting


def _socket_flags(spec: ServiceSpec, environ: Mapping[str, str]) -> list[str]:
    """Returns the flags of a frontend for the sockets of meshctl, with any descriptors."""
    if spec.http_port is None:
        return []
    return [_SOCKET_FLAG, ",".join(map(str, range(process_count(spec, environ))))]


def _fit(spec: ServiceSpec, problems: Sequence[str]) -> tuple[ServiceSpec, list[str]]:
    """Returns a service as its version can run it, and the problems that remain."""
    others = []
    for problem in problems:
        if problem.startswith(f"{_SOCKET_FLAG}:"):
            spec = replace(spec, binds_port=True)
        elif flag := _lacks(problem):
            at = spec.args.index(flag)
            spec = replace(spec, args=(*spec.args[:at], *spec.args[at + 2 :]))
        else:
            others.append(problem)
    return spec, others


def _lacks(problem: str) -> str:
    """Returns the flag that a version does not have; "": the problem is another one."""
    found = (flag for flag in _OTHER_FLAGS if problem.startswith(f"{flag}: no such flag"))
    return next(found, "")


def run_checks(checks: Sequence[object], environ: Mapping[str, str]) -> list[list[str]]:
    """Returns the problems of each check (see `settings_child`). Raises MeshFileError if they
    cannot be found."""
    command = [sys.executable, "-c", _CHILD]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(checks),
            capture_output=True,
            text=True,
            env=environ,
            timeout=TIMEOUT_S,
            check=True,
        )
        problems: list[list[str]] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        line = (str(error.stderr).strip().splitlines() or ["no output"])[-1]
        raise MeshFileError([f"the settings cannot be checked: {line}"]) from None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise MeshFileError([f"the settings cannot be checked: {error}"]) from None
    return problems
