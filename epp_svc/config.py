"""Configuration of the endpoint picker: flags `--...` and variables `KVMESH_EPP_...`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from common.errors import InvalidRequest
from common.runtime.config import Names, Port, ServiceConfig
from common.runtime.hosts import is_loopback
from epp_svc.core.hints import parse_objectives
from frontend_svc.models.alias_file import read_aliases


class EppConfig(ServiceConfig):
    """The settings of an endpoint picker."""

    ext_proc_host: str = "127.0.0.1"
    """Address that the port for gateways binds. Use 0.0.0.0 in a container."""
    ext_proc_port: Port = 9002
    """Port for gateways: ext_proc and gRPC health. 0: any."""
    ext_proc_open: bool = False
    """Allow an ext_proc_host that is open to other hosts without TLS: every host that reaches the
    port may request and book placements."""
    ext_proc_tls_cert_path: Path | None = None
    """PEM certificate chain of the port for gateways. With the key it enables TLS."""
    ext_proc_tls_key_path: Path | None = None
    """PEM private key of ext_proc_tls_cert_path."""
    ext_proc_tls_ca_path: Path | None = None
    """PEM certificate authorities of gateways, which must then have a certificate. Unset: none is
    required."""
    objectives: Names = ()
    """Priorities of the objectives that requests name in x-gateway-inference-objective, as
    NAME=PRIORITY. Higher goes first; a negative one is shed and not queued. Unknown objectives have
    0."""
    fallbacks: Annotated[int, Field(ge=0, le=16)] = 2
    """Endpoints beside the chosen one that the gateway may try if that does not respond."""
    aliases: str = ""
    """JSON object of names whose requests several models share by weight, or the path of a file
    with one, which is read again when it changes: as of a frontend, which should have the same.
    docs/operate/aliases.md has its keys."""
    pick_timeout_s: Annotated[float, Field(ge=0.05, le=600)] = 30.0
    """Seconds in which a request must be placed, the router's queue included; else it is shed
    (429). Must be below the message timeout of the gateway."""
    shed_after_s: NonNegativeFloat = 0.25
    """The same for requests with a negative priority."""
    body_limit_mb: PositiveInt = 45
    """Largest request body in MB. Raise it for very long prompts."""
    requests_max: PositiveInt = 8192
    """Concurrent requests, responses included. Above it requests are shed (429)."""

    @cached_property
    def priorities(self) -> Mapping[str, int]:
        """The priorities by objective. Raises ValueError."""
        return parse_objectives(self.objectives)

    def problems(self) -> list[str]:
        found = super().problems()
        try:
            _ = self.priorities
        except ValueError as error:
            found.append(f"objectives: {error}")
        try:
            read_aliases(self.aliases)
        except (OSError, InvalidRequest) as error:
            found.append(f"aliases: {error}")
        cert, key = self.ext_proc_tls_cert_path, self.ext_proc_tls_key_path
        if (cert is None) != (key is None) or (self.ext_proc_tls_ca_path and cert is None):
            found.append(
                "ext_proc_tls_cert_path: set both --ext-proc-tls-cert-path and"
                " --ext-proc-tls-key-path, and with them perhaps --ext-proc-tls-ca-path, or none"
            )
        is_open = self.ext_proc_open or self.insecure or cert is not None
        if not (is_loopback(self.ext_proc_host) or is_open):
            found.append(
                f"ext_proc_host: {self.ext_proc_host!r} is open to other hosts: set"
                " --ext-proc-tls-cert-path, or --ext-proc-open in a closed network"
            )
        return found
