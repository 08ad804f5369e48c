"""Certificates for tests of mutual TLS."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, rpc.Security]:
    """Two pairs for the name kvmesh.test, `good` and `other`, each trusting only itself."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs the openssl command to make certificates")
    made = {}
    for name in ("good", "other"):
        folder = tmp_path_factory.mktemp(name)
        config = ServiceConfig(
            tls_cert_path=folder / "cert.pem",
            tls_key_path=folder / "key.pem",
            tls_ca_path=folder / "cert.pem",
            tls_server_name="kvmesh.test",
        )
        # Self-signed: the certificate is its own authority.
        command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        command += f" -days 2 -subj /CN={name} -addext subjectAltName=DNS:kvmesh.test"
        command += f" -keyout {config.tls_key_path} -out {config.tls_cert_path}"
        subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
        made[name] = rpc.security_from_config(config)
    return made
