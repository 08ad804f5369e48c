"""Configuration of the frontend: flags `--...` and variables `KVMESH_FRONTEND_...`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from common.api_keys import parse_keys
from common.errors import InvalidRequest
from common.runtime.config import Descriptors, Names, Port, ServiceConfig, Share
from common.runtime.hosts import is_loopback
from frontend_svc.models.alias_file import read_aliases
from frontend_svc.openai.body.request_template import RequestTemplate, parse_templates

AuditContent = Literal["all", "request", "none"]


class FrontendConfig(ServiceConfig):
    """The settings of a frontend."""

    http_host: str = "127.0.0.1"
    """Address that the OpenAI API binds. Use 0.0.0.0 in a container."""
    http_port: Port = 8000
    """Port of the OpenAI API. 0: any."""
    http_fd: Descriptors = ()
    """File descriptors of sockets with one port, in place of http_host and http_port. Set by
    launchers, so that connections wait while a successor starts. Each process needs one."""
    http_tls_cert_path: Path | None = None
    """PEM certificate chain of the HTTP ports. With the key it enables TLS. Read again when it
    changes."""
    http_tls_key_path: Path | None = None
    """PEM private key of http_tls_cert_path."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share http_port, each with all settings and limits of a frontend. More than
    one: stable_name and the files of records end in a number, and port and health_port, if fixed,
    count up."""
    http_open: bool = False
    """Allow an http_host that is open to other hosts without api_keys: every client that reaches
    the port may use the API. --mesh-token does not protect it."""
    api_keys: Path | None = None
    """File of the API keys, which meshctl keys writes. Changes are read within 2 s. Unset: clients
    need no key."""
    cors_origins: Names = ()
    """Sites whose pages may send requests, such as https://chat.example.org. *: all. Requests of
    other sites' pages are refused."""
    allowed_hosts: Names = ()
    """Names by which clients reach this server. Other names in Host are refused; addresses and
    localhost are accepted. Unset: any name if http_host is open to other hosts, else none."""
    trust_traceparent: bool = False
    """Sample a request if its traceparent says so. Only behind a proxy that sets it. By default
    trace_sample_ratio decides."""
    request_timeout_s: Annotated[float, Field(ge=1)] = 600.0
    """Longest duration of a request. Must exceed the longest response."""
    accept_timeout_s: Annotated[float, Field(ge=0.05)] = 3.0
    """Seconds in which a worker must accept a request before the frontend tries another one. Must
    exceed the worst stall of a worker."""
    attempts_max: PositiveInt = 4
    """Attempts of one request that may fail, including the first. Those that end because their
    worker stops as planned do not count."""
    worker_wait_s: NonNegativeFloat = 30.0
    """Seconds for which a request waits while no worker of its model can serve it, within
    request_timeout_s. 0: it fails at once. Should exceed the restart of a worker."""
    canary_interval_s: NonNegativeFloat = 10.0
    """Mean seconds between two tests of a model by a request with one token of output. None is sent
    while requests of clients succeed. 0: off."""
    canary_timeout_s: Annotated[float, Field(ge=0.1)] = 15.0
    """Seconds in which such a request must be served. Should exceed the recovery of a lost request
    (10 s)."""
    configured_models: Names = ()
    """Models that this mesh is to serve. While no worker of one is registered, its requests wait
    for worker_wait_s, then they are a 503 instead of a 404, and /ready names it."""
    aliases: str = ""
    """JSON object of names whose requests several models share by weight (canaries, A/B tests),
    or the path of a file with one, which is read again when it changes. docs/operate/aliases.md has
    its keys."""
    body_limit_mb: PositiveInt = 45
    """Largest request body in MB. Raise it for very long prompts."""
    requests_max: PositiveInt = 8192
    """Concurrent requests. Above it clients receive 503."""
    connections_max: PositiveInt = 16_384
    """Open HTTP connections. Above it new ones receive 503 and are closed. Fewer if the hard limit
    of file descriptors (ulimit -Hn) is lower; below 1,024 the frontend does not start."""
    kv_drift_max: Share = 0.1
    """Share of wrongly predicted cached tokens above which the cache of a worker counts as unknown.
    Raise it if many requests with a common prefix arrive at once."""
    grammar_compile_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds in which the grammar of a JSON schema, tool or guided decoding must compile. Raise it
    for very large schemas."""
    keep_alive_s: Annotated[float, Field(ge=0.1)] = 15.0
    """Idle seconds after which a stream receives an SSE comment. Must be below the idle timeout of
    every proxy between frontend and client."""
    media_urls: bool = False
    """Fetch images and audio from http and https URLs in requests, from public addresses only. Off:
    only data: URLs are accepted."""
    media_hosts: Names = ()
    """Hosts as host:port from which media may be fetched although their addresses are private."""
    media_timeout_s: PositiveFloat = 10.0
    """Seconds in which a medium must arrive, redirects included."""
    media_limit_mb: Annotated[int, Field(ge=1, le=40)] = 32
    """Largest size in MB of all media of a request. With base64 it must fit into a gRPC message."""
    response_store_mb: NonNegativeInt = 256
    """Memory in MB for stored responses (`/v1/responses`) that the batch service does not store.
    Above it the oldest of the tenant that stores the most are removed. 0: none."""
    response_ttl_s: PositiveFloat = 86_400.0
    """Seconds after which a stored response is removed from this memory."""
    durable_responses: bool = True
    """Store responses in the batch service, while the mesh has one, so that they survive this
    process. Off: in memory only."""
    websocket_idle_s: PositiveFloat = 600.0
    """Seconds without a response after which a WebSocket (`GET /v1/responses`) is closed. Raise it
    if the tools of agents take longer."""
    websocket_age_s: PositiveFloat = 3600.0
    """Seconds after which a WebSocket takes no more events and is closed, as at OpenAI."""
    websocket_cache_mb: PositiveInt = 64
    """Memory in MB for the newest responses of open WebSockets, which their next event continues
    although `store` is false. Above it the oldest of the tenant that keeps the most are removed."""
    audit_log: str = ""
    """File for one JSON line per HTTP request with body and response. Each frontend needs a file of
    its own. Empty: none."""
    audit_content: AuditContent = "all"
    """Texts in the audit log: all (request and response), request, or none."""
    request_trace: str = ""
    """File for one JSON line per request to workers, without texts, for `meshctl replay`. Each
    frontend needs a file of its own. Empty: none."""
    record_file_mb: PositiveInt = 256
    """Size in MB at which these two files are renamed; four older ones of each are kept."""
    usage_file: str = ""
    """File of the usage records (SQLite, on a local disk): tokens by hour, tenant, key, model and
    adapter. Processes and frontends of a host may share it. Empty: records end with the
    frontend."""
    usage_days: PositiveInt = 90
    """Days after which usage records are removed."""
    recent_requests: Annotated[int, Field(ge=0, le=65_536)] = 1024
    """Requests whose timing and placement each process keeps in memory after their end, for
    `meshctl requests` and `meshctl trace`. 0: none."""
    metrics_prefix: str = "kvmesh_frontend"
    """First part of the metric names. Must match the dashboards."""
    metrics_families: Literal["both", "legacy", "current"] = "both"
    """Families of request metrics: legacy (nv_llm_http_service_...), current (named by
    metrics_prefix), or both."""
    metrics_path: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] = "/metrics"
    """Path of the metrics on the HTTP port."""

    request_template: Path | None = None
    """JSON file with defaults for the fields that requests leave out, by model. Read at the
    start."""

    @cached_property
    def request_templates(self) -> Mapping[str, RequestTemplate]:
        """The defaults by model. Raises OSError and InvalidRequest."""
        if self.request_template is None:
            return {}
        return parse_templates(self.request_template.read_bytes())

    def problems(self) -> list[str]:
        found = super().problems()
        try:
            _ = self.request_templates
        except (OSError, InvalidRequest) as error:
            found.append(f"request_template: {error}")
        try:
            read_aliases(self.aliases)
        except (OSError, InvalidRequest) as error:
            found.append(f"aliases: {error}")
        if (self.http_tls_cert_path is None) != (self.http_tls_key_path is None):
            found.append(
                "http_tls_cert_path: set both --http-tls-cert-path and --http-tls-key-path, or none"
            )
        if 0 < len(self.http_fd) < self.processes:
            found.append(
                f"http_fd: {len(self.http_fd)} sockets for {self.processes} processes; each needs"
                " one of its own"
            )
        if self.audit_log and self.audit_log == self.request_trace:
            found.append(f"request_trace: {self.request_trace!r} is the audit_log; name another")
        if self.api_keys is not None:
            try:
                parse_keys(self.api_keys.read_bytes())
            except (OSError, InvalidRequest) as error:
                found.append(f"api_keys: {error}")
        elif not (is_loopback(self.http_host) or self.http_open or self.insecure):
            found.append(
                f"http_host: {self.http_host!r} is open to other hosts, and clients need no key:"
                " set --api-keys, or --http-open behind a proxy that authenticates clients"
            )
        return found
