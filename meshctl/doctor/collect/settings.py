"""Settings of services by source: variables of this environment, and processes of this host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.runtime.config import FILE_SUFFIX, PREFIX, SERVICES, ServiceConfig, flag_name
from meshctl.doctor.facts import ProcessFacts

# A secret, whose file is named by the field with FILE_SUFFIX.
_SECRETS = (
    "mesh_token",
    "admin_token",
    "operator_token",
    "consul_token",
    "mesh_key",
    "metrics_key",
)
_API_KEYS = "api_keys"
SECRET_FIELDS = (
    *(f"{name}{FILE_SUFFIX}" for name in _SECRETS),
    "tls_key_path",
    "http_tls_key_path",
    _API_KEYS,
)
# Ports that a service binds, with the field of their host.
PORT_FIELDS = {
    "port": "host",
    "stream_port": "host",
    "health_port": "host",
    "bootstrap_port": "host",
    "metrics_port": "metrics_host",
    "http_port": "http_host",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that belong together. texts: by field name. labels: the flag or variable of each.
    folder: to which relative paths refer."""

    texts: Mapping[str, str]
    labels: Mapping[str, str]
    folder: Path = Path()

    def path(self, field: str) -> Path | None:
        """Returns the path that a field names; None if it is unset."""
        text = self.texts.get(field, "")
        return self.folder / text if text else None


@dataclass(frozen=True, slots=True)
class Planned:
    """What a mesh file and the environment say about services that may not run yet."""

    problems: tuple[str, ...] = ()
    """Settings that a service would refuse, as `name: problem`."""

    settings: tuple[Settings, ...] = ()
    """Of each service of the mesh file."""

    expected: tuple[str, ...] = ()
    """Stable names of these services."""

    required: tuple[str, ...] = ()
    """Roles that the mesh file requires."""


def of_config(config: ServiceConfig) -> Settings:
    """Returns the paths of the settings of doctor itself."""
    texts = {name: str(value) for name, value in config if isinstance(value, Path)}
    return Settings(texts, {field: flag_name(field) for field in texts})


def of_environment(environ: Mapping[str, str]) -> list[Settings]:
    """Returns the settings that services started from this environment would have, each service
    once."""
    mesh_wide = {
        name: name.removeprefix(PREFIX).lower() for name in environ if name.startswith(PREFIX)
    }
    own_prefixes = tuple(f"{PREFIX}{service}_" for service in SERVICES)
    shared = {
        field: variable
        for variable, field in mesh_wide.items()
        if not variable.startswith(own_prefixes)
    }
    found = []
    for prefix in own_prefixes:
        own = {
            name.removeprefix(prefix).lower(): name for name in environ if name.startswith(prefix)
        }
        labels = {**shared, **own}
        found.append(Settings({f: environ[name] for f, name in labels.items()}, labels))
    return found


def of_process(process: ProcessFacts) -> Settings:
    """Returns the settings of a running service."""
    labels = {field: flag_name(field) for field in process.settings}
    return Settings(process.settings, labels, process.folder)


def secret_files(sources: Iterable[Settings]) -> Iterator[tuple[Path, str, bool]]:
    """Yields each file of secrets once, with the setting that names it, and whether it contains
    API keys."""
    seen = set()
    for source in sources:
        for field in SECRET_FIELDS:
            path = source.path(field)
            if path is not None and path.absolute() not in seen:
                seen.add(path.absolute())
                yield path, source.labels[field], field == _API_KEYS


def record_folders(sources: Iterable[Settings]) -> Iterator[Path]:
    """Yields the folders of audit logs and request traces."""
    for source in sources:
        for field in ("audit_log", "request_trace"):
            if (path := source.path(field)) is not None:
                yield path.parent


def fixed_ports(sources: Iterable[Settings]) -> Iterator[tuple[int, str, str]]:
    """Yields each fixed port once, with its host and the setting that names it."""
    seen = set()
    for source in sources:
        for field, host_field in PORT_FIELDS.items():
            text = source.texts.get(field, "")
            if text.isdecimal() and int(text) and text not in seen:
                seen.add(text)
                host = source.texts.get(host_field) or source.texts.get("host") or "127.0.0.1"
                yield int(text), host, source.labels[field]
