"""Opens the registry that a configuration names."""

from __future__ import annotations

from common.config import ServiceConfig
from common.errors import InvalidRequest
from common.file_registry import FileRegistry
from common.registry import MemoryRegistry, Registry


def open_registry(config: ServiceConfig) -> Registry:
    """The registry `config.registry` names. Raises InvalidRequest for one that is not there."""
    match config.registry:
        case "file":
            return FileRegistry(config.registry_path)
        case "memory":
            return MemoryRegistry()
        case other:
            raise InvalidRequest(f"the registry {other!r} is not available", "registry")
