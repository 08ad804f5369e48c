"""The settings of a mesh file as variables of the services (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from common.runtime.config import FILE_SUFFIX, PREFIX, SERVICES
from meshctl.mesh_file.document import KeyPath
from meshctl.mesh_file.schema import MeshFile, ServiceSection

# Settings that meshctl gives its services, and the key that sets each; "": none does.
_OWN: Final[Mapping[str, str]] = {
    **{name: name for name in ("namespace", "registry", "registry_path", "consul_url", "drain_s")},
    **{name: f"frontends.{name}" for name in ("http_host", "http_port")},
    "otlp_port": "consoles.otlp_port",
    "ext_proc_port": "pickers.ext_proc_port",
    **{name: f"workers[].{name}" for name in ("engine", "role", "model_path", "engine_args")},
    "model_name": "workers[].model",
    "required_roles": "require",
    **dict.fromkeys(("stable_name", "notice_s", "ready_fd", "http_fd"), ""),
}
# Ports of which each process on a host needs its own.
PORTS: Final = ("port", "stream_port", "health_port", "metrics_port", "ext_proc_port")
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_OF_SERVICE = re.compile(rf"{PREFIX}(?:{'|'.join(SERVICES)})_")


@dataclass(slots=True)
class Variables:
    """The variables of a process. origins: the key of the file that set each of them."""

    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, KeyPath] = field(default_factory=dict)

    def add(self, path: KeyPath, section: ServiceSection | MeshFile, prefix: str) -> None:
        """Adds the settings and variables of a section; later ones replace earlier ones.

        prefix: of the variables of settings, such as `KVMESH_WORKER_`.
        """
        for name, value in section.settings.items():
            self.put(prefix + name.upper(), value, (*path, "settings", name))
        for name, value in section.environment.items():
            self.put(name, value, (*path, "environment", name))

    def put(self, variable: str, value: str, origin: KeyPath) -> None:
        self.values = with_variables(self.values, {variable: value})
        self.origins[variable] = origin


def service_prefix(service: str) -> str:
    """Returns the beginning of the variables of a service."""
    return f"{PREFIX}{service.upper()}_"


def with_variables(environ: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with other values, without the variables that they replace.

    A setting may have four variables: of a service or mesh-wide, each with its text or its file.
    """
    replaced = set()
    for name in values:
        if name.startswith(PREFIX):
            own = name.removesuffix(FILE_SUFFIX.upper())
            of_setting = {own, _OF_SERVICE.sub(PREFIX, own)}
            replaced |= of_setting | {f"{variable}{FILE_SUFFIX.upper()}" for variable in of_setting}
    kept = {name: value for name, value in environ.items() if name not in replaced}
    return {**kept, **values}


def find_setting_problems(mesh: MeshFile) -> Iterator[tuple[KeyPath, str]]:
    """Yields the settings that are in the wrong place or have impossible names; the services check
    the others."""
    yield from _section_problems((), mesh)
    yield from _section_problems(("frontends",), mesh.frontends)
    yield from _section_problems(("routers",), mesh.routers)
    yield from _section_problems(("indexers",), mesh.indexers)
    yield from _section_problems(("batches",), mesh.batches)
    yield from _section_problems(("pickers",), mesh.pickers)
    yield from _section_problems(("consoles",), mesh.consoles)
    for i, group in enumerate(mesh.workers):
        yield from _section_problems(("workers", i), group)
        for n, override in enumerate(group.each):
            yield from _section_problems(("workers", i, "each", n), override)


def _section_problems(
    path: KeyPath, section: ServiceSection | MeshFile
) -> Iterator[tuple[KeyPath, str]]:
    for name in section.settings:
        at = (*path, "settings", name)
        if not _NAME.match(name):
            near = name.lower().replace("-", "_").lstrip("_")
            yield at, f"no such setting; names have underscores: {near}"
        elif name in _OWN:
            key = _OWN[name]
            if path[:1] == ("consoles",):
                key = key.replace("frontends", "consoles")
            yield at, f"set it with the key {key}" if key else "is set by meshctl"
    for name in section.environment:
        if name.startswith(PREFIX):
            yield (*path, "environment", name), "is a setting; give it under `settings`"
