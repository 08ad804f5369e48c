"""Opens the registry that a configuration names."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.registry.file import FileRegistry
from common.registry.instances import HEALTH_META_KEY
from common.registry.registry import MemoryRegistry, Registry
from common.registry.signature import EntrySigner
from common.runtime.config import ServiceConfig
from common.runtime.member_key import MemberKeys


def open_registry(config: ServiceConfig, members: MemberKeys | None = None) -> Registry:
    """Returns the registry that `config.registry` names. Raises InvalidRequest for an unknown
    one.

    members: the keys that the process knows; None: it is no member.
    """
    if members is None:
        members = MemberKeys(is_required=config.has_mesh_secret)
    signer = EntrySigner(config.mesh_token, members=members)
    match config.registry:
        case "file":
            return FileRegistry(config.registry_path, signer=signer)
        case "consul":
            # Imported here: py-consul takes 0.1 s, and most processes do not need it.
            from common.registry.consul.registry import ConsulRegistry

            return ConsulRegistry(
                config.consul_url,
                token=config.consul_token,
                ca_path=config.consul_ca_path,
                signer=signer,
            )
        case "memory":
            return MemoryRegistry()
        case other:
            raise InvalidRequest(f"unknown registry {other!r}", "registry")


def describe_registry(config: ServiceConfig) -> str:
    """Returns the name of the registry, for messages."""
    if config.registry == "consul":
        return f"Consul at {config.consul_url}"
    path = config.registry_path.resolve()
    return f"the registry {path}" + ("" if path.is_dir() else " (folder does not exist)")


def health_check_meta(
    config: ServiceConfig, address: str, health_port: int | None
) -> dict[str, str]:
    """Returns entries for `Instance.meta` with which Consul checks the health of a service.

    address: its gRPC address as advertised. health_port: the bound port of its health server
    (`life.health.port`), or None. Without it Consul checks the gRPC port; under mutual TLS it
    cannot, then the result is empty and a TTL keeps the registration alive.
    """
    if health_port is not None:
        return {HEALTH_META_KEY: f"{address.rpartition(':')[0]}:{health_port}"}
    return {} if config.tls_cert_path is not None else {HEALTH_META_KEY: address}
