"""The name that separates the meshes of one registry (pure)."""

from __future__ import annotations

import re

from common.errors import InvalidRequest

# A namespace is a directory name and a part of Consul's service names.
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_namespace(namespace: str) -> None:
    """Raises InvalidRequest unless `namespace` fits a directory name and a service name."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidRequest(
            f"namespace {namespace!r} must be 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            "namespace",
        )
