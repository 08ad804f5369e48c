"""Opens the registry that a configuration names."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.registry.consul import HEALTH_META_KEY, ConsulRegistry
from common.registry.file import FileRegistry
from common.registry.registry import MemoryRegistry, Registry
from common.runtime.config import ServiceConfig


def open_registry(config: ServiceConfig) -> Registry:
    """The registry `config.registry` names. Raises InvalidRequest for one that is not there."""
    match config.registry:
        case "file":
            return FileRegistry(config.registry_path)
        case "consul":
            return ConsulRegistry(config.consul_url, token=config.consul_token)
        case "memory":
            return MemoryRegistry()
        case other:
            raise InvalidRequest(f"the registry {other!r} is not available", "registry")


def health_check_meta(
    config: ServiceConfig, address: str, health_port: int | None
) -> dict[str, str]:
    """What an app adds to `Instance.meta` so that the registry can ask for its health.

    address: its gRPC address as advertised. health_port: the bound port of its HealthThread
    (`life.health.port`), None if it has none; then its gRPC port is asked, unless mutual TLS
    bars Consul's agent from it: then nothing is, and the lease keeps the registration alive.
    """
    if health_port is not None:
        return {HEALTH_META_KEY: f"{address.rpartition(':')[0]}:{health_port}"}
    return {} if config.tls_cert_path is not None else {HEALTH_META_KEY: address}
