"""Configuration of the console: flags `--...` and variables `KVMESH_CONSOLE_...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from common.access.login_links import DEFAULT_FOLDER
from common.api_keys import parse_keys
from common.errors import InvalidRequest
from common.runtime.config import Names, Port, ServiceConfig
from common.runtime.hosts import is_loopback


class ConsoleConfig(ServiceConfig):
    """The settings of a console."""

    http_host: str = "127.0.0.1"
    """Address that the pages bind. Use 0.0.0.0 in a container."""
    http_port: Port = 8070
    """Port of the pages. 0: any."""
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/\s]+)?$")] = ""
    """URL under which browsers reach the console, for links: that of a proxy, or of a published
    port. Unset: http_host and http_port."""
    http_tls_cert_path: Path | None = None
    """PEM certificate chain of the pages. With the key it enables TLS. Read again when it
    changes."""
    http_tls_key_path: Path | None = None
    """PEM private key of http_tls_cert_path."""
    http_open: bool = False
    """Allow an http_host that is open to other hosts without TLS. Only behind a proxy that adds it,
    or if the port is published on one host."""
    allowed_hosts: Names = ()
    """Names by which browsers reach this server. Other names in Host are refused; addresses,
    localhost and the name in public_url are accepted."""
    api_keys: Path | None = None
    """File of the API keys, as that of the frontends. Keys with the scope admin log in, and
    operators can revoke keys. Unset: only one-time links log in."""
    login_path: Path = DEFAULT_FOLDER
    """Folder of the one-time links for logins (meshctl console). Whoever can write into it can log
    in."""
    frontend_key: str | None = Field(default=None, repr=False)
    """API key with the scope admin that frontends require for their metrics. Unset: metrics_key."""
    interval_s: Annotated[float, Field(ge=0.2, le=60)] = 2.0
    """Seconds between two measurements."""
    queries_per_s: Annotated[float, Field(ge=1, le=10_000)] = 100.0
    """Members asked in a second at most. With more members each is asked less often than every
    interval_s."""
    domain_taint: str = ""
    """First part of the taint that names the transfer domain of a worker, as
    kv_transfer_domain of the routers. Unset: none is shown."""
    requests_max: Annotated[int, Field(ge=10, le=100_000)] = 1000
    """Recent requests that are listed."""
    otlp_host: str = "127.0.0.1"
    """Address that the OTLP receiver binds."""
    otlp_port: Port = 8071
    """Port of the OTLP receiver, over gRPC without TLS. 0: any."""
    otlp_key: str | None = Field(default=None, repr=False)
    """Secret that exporters send as a bearer token (their otlp_headers). Required if otlp_host is
    open to other hosts."""
    traces_max: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Traces that are kept."""
    trace_spans_max: Annotated[int, Field(ge=8, le=10_000)] = 256
    """Spans of a trace that are kept."""
    traces_mb: PositiveInt = 64
    """Memory in MB for spans. Above it the oldest traces are removed."""
    viewers_max: Annotated[int, Field(ge=1, le=10_000)] = 512
    """Open connections of browsers. Above it new ones receive 503."""
    reconnect_s: NonNegativeFloat = 15.0
    """Seconds for which the state of a page is kept after its connection broke."""
    trace_files: Path | None = None
    """Folder of trace files for replays (--request-trace of a frontend). Unset: only generated
    workloads."""

    @property
    def uses_https(self) -> bool:
        """Whether browsers reach it over TLS: its own, or that of a proxy."""
        return self.http_tls_cert_path is not None or self.public_url.startswith("https:")

    def problems(self) -> list[str]:
        found = super().problems()
        has_tls = self.http_tls_cert_path is not None
        if has_tls != (self.http_tls_key_path is not None):
            found.append(
                "http_tls_cert_path: set both --http-tls-cert-path and --http-tls-key-path, or none"
            )
        if not (is_loopback(self.http_host) or has_tls or self.http_open or self.insecure):
            found.append(
                f"http_host: {self.http_host!r} is open to other hosts, and keys would cross the "
                "network unencrypted: set --http-tls-cert-path, or --http-open behind a proxy"
            )
        if not (is_loopback(self.otlp_host) or self.otlp_key or self.insecure):
            found.append(
                f"otlp_host: {self.otlp_host!r} is open to other hosts; set --otlp-key-file or"
                " --insecure"
            )
        if self.api_keys is not None:
            try:
                parse_keys(self.api_keys.read_bytes())
            except (OSError, InvalidRequest) as error:
                found.append(f"api_keys: {error}")
        return found
