"""Certificates for tests of mutual TLS."""

from __future__ import annotations

import pytest

from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from tests.kit.certificates import Authority


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, rpc.Security]:
    """Two pairs for the name kvmesh.test, `good` and `other`, each trusting only its authority."""
    made = {}
    for name in ("good", "other"):
        authority = Authority(tmp_path_factory.mktemp(name))
        cert, key = authority.issue(name, ["DNS:kvmesh.test"])
        made[name] = rpc.security_from_config(
            ServiceConfig(
                tls_cert_path=cert,
                tls_key_path=key,
                tls_ca_path=authority.ca,
                tls_server_name="kvmesh.test",
            )
        )
    return made
