"""The services that a mesh file names, and whether the parsers of the services accept settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.runtime.config import PREFIX, SERVICES, ConfigError, read_config
from meshctl.commands.mesh_options import UP_FLAGS, read_specs
from meshctl.doctor.collect.processes import read_settings
from meshctl.doctor.collect.settings import Planned, Settings
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh
from meshctl.options import UpOptions
from meshctl.process.environment import service_environment
from meshctl.process.settings_check import run_checks
from meshctl.services import ServiceSpec


def read_environment(environ: Mapping[str, str]) -> Planned:
    """Returns the variables of services that these would refuse. It takes a second or two if the
    environment has some."""
    own = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    services = [s for s in SERVICES if any(name.startswith(f"{PREFIX}{s}_") for name in own)]
    if not services:
        return Planned()
    checks = [{"service": s.lower(), "args": [], "environ": own} for s in services]
    try:
        found = run_checks(checks, service_environment(environ, "worker_svc"))
    except MeshFileError as error:
        return Planned(problems=error.problems)
    return Planned(problems=tuple(dict.fromkeys(problem for of in found for problem in of)))


def read_mesh(loaded: LoadedMesh, environ: Mapping[str, str]) -> Planned:
    """Returns the services of a mesh file."""
    path = Path(loaded.document.name)
    flags = [f"--file={path}", *loaded.option_flags([])]
    try:
        options, _ = read_config(UpOptions, None, environ, flags, flags=UP_FLAGS)
        specs = read_specs(options, environ)
    except (ConfigError, MeshFileError) as error:
        return Planned(problems=error.problems)
    return Planned(
        settings=tuple(_settings(spec, path, environ) for spec in specs),
        expected=tuple(f"{options.name_prefix}{spec.name}" for spec in specs),
        required=tuple(loaded.mesh.require),
    )


def _settings(spec: ServiceSpec, path: Path, environ: Mapping[str, str]) -> Settings:
    texts = read_settings([spec.module, *spec.args], spec.with_environ(environ))
    if spec.http_port is not None:
        texts["http_port"] = str(spec.http_port)
    return Settings(texts, {field: f"{field} of {path}" for field in texts})
