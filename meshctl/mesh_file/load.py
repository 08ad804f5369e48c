"""Reads a mesh file."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from common.runtime.config import (
    PREFIX,
    SERVICES,
    ConfigError,
    ServiceConfig,
    flag_name,
    read_config,
)
from meshctl.mesh_file.document import Document, KeyPath, MeshFileError, read_document
from meshctl.mesh_file.placed_adapters import find_placement_problems
from meshctl.mesh_file.schema import OPTION_KEYS, MeshFile, parse_mesh_file
from meshctl.mesh_file.settings import find_setting_problems, with_variables

FILE_BYTES_MAX = 1 << 20
_VARIABLE = re.compile(rf"{PREFIX}(?:(?:{'|'.join(SERVICES)})_)?([A-Z0-9_]+)")
# Keys of sections with the flag for their count.
_COUNTS = ("frontends", "routers", "indexers", "batches", "pickers", "consoles")
_CERTIFICATE = ("tls_cert_path", "tls_key_path")


@dataclass(frozen=True, slots=True)
class LoadedMesh:
    """A mesh file with the places of its keys."""

    document: Document
    mesh: MeshFile

    def option_flags(self, given: Sequence[str]) -> list[str]:
        """Returns the flags of `meshctl up` that the file sets.

        given: the command line, whose flags have precedence.
        """
        mesh = self.mesh
        values: dict[str, object] = {key: getattr(mesh, key) for key in OPTION_KEYS}
        for key in _COUNTS:
            if key in mesh.model_fields_set:
                values[key] = getattr(mesh, key).count
        if "frontends" in mesh.model_fields_set:
            values["http_port"] = mesh.frontends.http_port
        if "pickers" in mesh.model_fields_set:
            values["ext_proc_port"] = mesh.pickers.ext_proc_port
        if "consoles" in mesh.model_fields_set:
            values["console_port"] = mesh.consoles.http_port
            values["console_otlp_port"] = mesh.consoles.otlp_port
        if mesh.pass_environ:
            values["pass_environ"] = ",".join(mesh.pass_environ)
        flags = {word.partition("=")[0] for word in given}
        return [
            f"{flag_name(name)}={value}"
            for name, value in values.items()
            if value is not None and flag_name(name) not in flags
        ]

    def with_shared_settings(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns an environment with the settings of every service, for meshctl itself.

        If they have authorities only, and certificates are not bound to roles, meshctl uses the
        certificate of the first service that has one.
        """
        shared = {_variable(name): text for name, text in self.mesh.settings.items()}
        if "http_host" in self.mesh.frontends.model_fields_set:
            shared[f"{PREFIX}FRONTEND_HTTP_HOST"] = self.mesh.frontends.http_host
        values = with_variables(environ, shared)
        given = [name for name in (*_CERTIFICATE, "tls_role_domain") if values.get(_variable(name))]
        return values if given or not values.get(_variable("tls_ca_path")) else self._own(values)

    def _own(self, values: Mapping[str, str]) -> dict[str, str]:
        """Returns variables with the certificate of a service, if one has its own."""
        mesh = self.mesh
        for section in (
            *(mesh.frontends, mesh.routers, mesh.indexers, mesh.batches, mesh.pickers),
            *mesh.workers,
        ):
            found = {_variable(name): section.settings.get(name, "") for name in _CERTIFICATE}
            if all(found.values()):
                return {**values, **found}
        return dict(values)

    def place(self, problem: str, origins: Mapping[str, KeyPath], service: str = "") -> str:
        """Returns a problem of `read_config` with the place of its key.

        - origins: the keys by flag or variable. A problem of another flag or variable is returned
          with the name of the file, and of the service.
        - service: a process of the mesh; "": all.
        """
        source, _, text = problem.partition(":")
        if source not in origins:
            return ": ".join(filter(None, (self.document.name, service, problem)))
        text = _VARIABLE.sub(lambda match: match[1].lower(), text.strip())
        text = text.replace("no such variable", "no such setting")
        return self.document.problem(origins[source], text)


def read_mesh_file(path: Path, environ: Mapping[str, str] = MappingProxyType({})) -> LoadedMesh:
    """Returns the content of a file. Raises MeshFileError.

    environ: of meshctl; its settings and those of the file must fit together.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # A pipe can be read only once.
            raise MeshFileError([f"{path}: is not a regular file; a restart reads it again"])
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        text = raw.decode()
    except OSError as error:
        raise MeshFileError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise MeshFileError([f"{path}: is not UTF-8"]) from None
    if len(raw) > FILE_BYTES_MAX:
        raise MeshFileError([f"{path}: is larger than {FILE_BYTES_MAX} bytes"])
    document = read_document(str(path), text)
    mesh = parse_mesh_file(document)
    loaded = LoadedMesh(document, mesh)
    found = [*find_setting_problems(mesh), *find_placement_problems(mesh.adapters)]
    problems = [document.problem(at, message) for at, message in found]
    problems += _shared_setting_problems(loaded, environ)
    if problems:
        raise MeshFileError(problems)
    return loaded


def _variable(setting: str) -> str:
    return f"{PREFIX}{setting.upper()}"


def _shared_setting_problems(loaded: LoadedMesh, environ: Mapping[str, str]) -> list[str]:
    """Returns the problems of top-level settings. Those of variables are found by the command."""
    origins: dict[str, KeyPath] = {
        _variable(name): ("settings", name) for name in loaded.mesh.settings
    }
    values = loaded.with_shared_settings(environ)
    try:
        read_config(ServiceConfig, None, values, [], name="meshctl up")
    except ConfigError as error:
        others = environ.keys() - origins.keys()
        found = [problem for problem in error.problems if problem.partition(":")[0] not in others]
        return [loaded.place(problem, origins) for problem in found]
    return []
