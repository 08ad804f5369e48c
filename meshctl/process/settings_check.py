"""Checks the settings of a mesh file with the parsers of the services, in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from common.runtime.config import PREFIX
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh
from meshctl.process.environment import service_environment
from meshctl.services import ServiceSpec, find_port_problems

# For the imports of the four configurations on a busy machine.
TIMEOUT_S = 60.0


def check_settings(
    loaded: LoadedMesh, specs: Sequence[ServiceSpec], environ: Mapping[str, str]
) -> None:
    """Raises MeshFileError with the settings that the services would refuse."""
    checks = [
        {
            "service": spec.module.removesuffix("_svc"),
            "args": spec.args,
            "environ": {
                name: value
                for name, value in spec.with_environ(environ).items()
                if name.startswith(PREFIX)
            },
        }
        for spec in specs
    ]
    found = run_checks(checks, service_environment(environ, "worker_svc"))
    problems = [loaded.document.problem(at, text) for at, text in find_port_problems(specs)]
    problems += [
        loaded.place(problem, spec.origins)
        for spec, of_spec in zip(specs, found, strict=True)
        for problem in of_spec
    ]
    if problems:
        raise MeshFileError(problems)


def run_checks(checks: Sequence[object], environ: Mapping[str, str]) -> list[list[str]]:
    """Returns the problems of each check (see `settings_child`). Raises MeshFileError if they
    cannot be found."""
    command = [sys.executable, "-m", "meshctl.process.settings_child"]
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
