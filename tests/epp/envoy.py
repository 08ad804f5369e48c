"""One Envoy process with a listener for each way to choose a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import httpx

from common.runtime.free_ports import free_ports
from tests.kit.processes import PARENT_GUARD
from tests.kit.waiting import wait_for

VERSION: Final = "1.40.0"
INSTALL: Final = (
    "python3 -m venv .venv-epp && .venv-epp/bin/pip install -r tests/epp/requirements.txt"
)
DEFAULT: Final = Path(".venv-epp/bin/envoy")
START_S: Final = 60.0
# Of the listener `impatient`.
MESSAGE_TIMEOUT_S: Final = 0.3
# Of a body that Envoy buffers.
BODY_BYTES_MAX: Final = 48 << 20
# By request header, in place of a gateway that knows subsets.
SUBSET_HEADER: Final = "x-test-subset"
# Of responses: the server that they are from.
UPSTREAM_HEADER: Final = "x-test-upstream"
_TYPE: Final = "type.googleapis.com/envoy."
_HTTP: Final = f"{_TYPE}extensions.filters.http."
_LB: Final = "envoy.load_balancing_policies."
_DUPLEX: Final = "FULL_DUPLEX_STREAMED"

# Any, here and below: JSON.
Json = dict[str, Any]


class EnvoyMissing(Exception):
    """There is no Envoy; the text has the command that installs it."""


def find_envoy(path: Path | None) -> Path:
    """Returns the binary. Raises EnvoyMissing."""
    found = path or (DEFAULT if DEFAULT.exists() else None) or shutil.which("envoy")
    if found is None or not Path(found).exists():
        raise EnvoyMissing(f"Envoy {VERSION} is not installed: {INSTALL}")
    return Path(found)


class Envoy:
    """The process. LISTENERS: each on a port of its own."""

    LISTENERS: Final = (
        *("picked", "buffered", "resilient", "limited", "secure", "impatient", "single"),
        *("round_robin", "least_request"),
    )

    def __init__(
        self,
        binary: Path,
        folder: Path,
        servers: Sequence[str],
        pickers: Mapping[str, Sequence[str]],
    ) -> None:
        """
        - servers: host:port of each.
        - pickers: host:port of the pickers of the clusters `pickers`, `limited` and `secure`, whose
            pickers have TLS.
        """
        port = free_ports(len(self.LISTENERS) + 1)
        self._admin = port + len(self.LISTENERS)
        self._ports = {name: port + at for at, name in enumerate(self.LISTENERS)}
        config = folder / "envoy.json"
        config.write_text(json.dumps(self._config(servers, pickers), indent=1))
        self.log_path = folder / "envoy.log"
        self._log: IO[bytes] = self.log_path.open("wb")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid())),
                *(str(binary.absolute()), "-c", str(config), "--concurrency", "1"),
                *("--disable-hot-restart", "--log-level", "warning"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Envoy:
        wait_for(self._is_ready, f"Envoy serves\n{self.tail()}", START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def url(self, listener: str) -> str:
        return f"http://127.0.0.1:{self._ports[listener]}"

    def address(self, listener: str) -> tuple[str, int]:
        return "127.0.0.1", self._ports[listener]

    def tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-2000:]

    def healthy_pickers(self) -> int:
        """Returns how many pickers its health checks find."""
        text = httpx.get(f"http://127.0.0.1:{self._admin}/clusters", trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("pickers::127")]
        return sum("::health_flags::healthy" in line for line in lines)

    def version(self) -> str:
        """Returns what the server states of itself."""
        info = httpx.get(f"http://127.0.0.1:{self._admin}/server_info", trust_env=False).json()
        return str(info["version"])

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, f"Envoy ended\n{self.tail()}"
        try:
            return httpx.get(f"http://127.0.0.1:{self._admin}/ready", trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def _config(self, servers: Sequence[str], pickers: Mapping[str, Sequence[str]]) -> Json:
        listeners = [
            self._listener("picked", "pool", _subset(), _ext_proc("pickers", _DUPLEX, _DUPLEX)),
            self._listener("buffered", "pool", _ext_proc("pickers", "BUFFERED", _DUPLEX)),
            self._listener("resilient", "pool", _ext_proc("pickers", "BUFFERED", "NONE")),
            self._listener("limited", "pool", _ext_proc("limited", _DUPLEX, _DUPLEX)),
            self._listener("secure", "pool", _ext_proc("secure", _DUPLEX, _DUPLEX)),
            self._listener(
                "impatient", "pool", _ext_proc("pickers", _DUPLEX, _DUPLEX, MESSAGE_TIMEOUT_S)
            ),
            self._listener("single", "pool", _ext_proc("pickers", _DUPLEX, _DUPLEX), retries_max=0),
            self._listener("round_robin", "round_robin"),
            self._listener("least_request", "least_request"),
        ]
        clusters = [
            _cluster("pool", servers, _override_host()),
            _cluster("round_robin", servers, _policy("round_robin", "RoundRobin")),
            _cluster("least_request", servers, _policy("least_request", "LeastRequest")),
            *(_picker_cluster(name, addresses) for name, addresses in pickers.items()),
        ]
        return {
            "admin": {"address": _socket("127.0.0.1", self._admin)},
            "static_resources": {"listeners": listeners, "clusters": clusters},
        }

    def _listener(self, name: str, cluster: str, *filters: Json, retries_max: int = 2) -> Json:
        route: Json = {"cluster": cluster, "timeout": "0s"}
        if retries_max:
            retries = {"retry_on": "connect-failure,reset", "num_retries": retries_max}
            route["retry_policy"] = retries
        served = {"key": UPSTREAM_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
        manager = {
            "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3"
            ".HttpConnectionManager",
            "stat_prefix": name,
            "http_protocol_options": {"enable_trailers": True},
            "route_config": {
                "response_headers_to_add": [{"header": served}],
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "route": route}],
                    }
                ],
            },
            "http_filters": [*filters, _filter("router", "Router", {})],
            "local_reply_config": _reasons(),
        }
        chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        address = _socket("127.0.0.1", self._ports[name])
        return {
            "name": name,
            "address": address,
            "per_connection_buffer_limit_bytes": BODY_BYTES_MAX,
            "filter_chains": [{"filters": [chain]}],
        }


def _reasons() -> Json:
    """Returns what makes a 500 of Envoy state its reason, such as the status of a lost picker."""
    status = {"value": {"default_value": 500, "runtime_key": "unused"}}
    text = {"text_format_source": {"inline_string": "%RESPONSE_CODE_DETAILS%"}}
    mapper = {
        "filter": {"status_code_filter": {"comparison": {"op": "EQ", **status}}},
        "body_format_override": text,
    }
    return {"mappers": [mapper]}


def _ext_proc(
    cluster: str, request_mode: str, response_mode: str, message_timeout_s: float = 35.0
) -> Json:
    """Returns the filter of the picker, as the inference extension of the Gateway API needs it."""
    retries = {"num_retries": 2, "retry_on": "connect-failure,refused-stream,reset,unavailable"}
    config = {
        "grpc_service": {
            "envoy_grpc": {"cluster_name": cluster},
            "timeout": "10s",
            "retry_policy": retries,
        },
        "failure_mode_allow": False,
        "message_timeout": f"{message_timeout_s:g}s",
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": request_mode,
            "response_body_mode": response_mode,
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
    }
    if request_mode == "BUFFERED" and response_mode == "NONE":
        # Envoy has all that the picker has: a request goes on without it. A body in full duplex is
        # lost with its stream, so that Envoy ends the request whatever this says.
        config["failure_mode_allow"] = True
    return _filter("ext_proc", "ExternalProcessor", config)


def _subset() -> Json:
    """Returns the filter that makes a header of the test the subset of the request."""
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    return _filter("header_to_metadata", "Config", {"request_rules": [rule]})


def _filter(name: str, message: str, config: Json) -> Json:
    typed = {"@type": f"{_HTTP}{name}.v3.{message}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _policy(name: str, message: str, **config: Any) -> Json:
    kind = f"{_TYPE}extensions.load_balancing_policies.{name}.v3.{message}"
    extension = {"name": f"{_LB}{name}", "typed_config": {"@type": kind, **config}}
    return {"policies": [{"typed_extension_config": extension}]}


def _override_host() -> Json:
    """Returns the policy that follows the picker: the endpoints in their order."""
    return _policy(
        "override_host",
        "OverrideHost",
        override_host_sources=[{"header": "x-gateway-destination-endpoint"}],
        fallback_policy=_policy("round_robin", "RoundRobin"),
    )


def _cluster(name: str, addresses: Sequence[str], policy: Json) -> Json:
    endpoints = [
        {"endpoint": {"address": _socket(host, int(port))}}
        for host, _, port in (address.rpartition(":") for address in addresses)
    ]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": policy,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _picker_cluster(name: str, addresses: Sequence[str]) -> Json:
    """Returns a cluster of pickers, whose gRPC health decides which of them get streams."""
    protocol = {
        "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    check = {
        "timeout": "1s",
        "interval": "0.25s",
        "no_traffic_interval": "0.25s",
        # One slow response of a busy picker, while no other runs, would lose requests.
        "unhealthy_threshold": 3,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
    }
    tls = f"{_TYPE}extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    # As gateways do it for pickers: TLS, and no certificate is verified.
    encrypted = {"name": "envoy.transport_sockets.tls", "typed_config": {"@type": tls}}
    return {
        **_cluster(name, addresses, _policy("round_robin", "RoundRobin")),
        **({"transport_socket": encrypted} if name == "secure" else {}),
        "health_checks": [check],
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol
        },
    }


def _socket(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}
