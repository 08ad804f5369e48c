"""The frontend's configuration: flags `--...` and variables `KVMESH_FRONTEND_...`."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.runtime.config import ServiceConfig, at_least, between, is_loopback, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(ServiceConfig):
    """What the gateway can be told."""

    stable_name: str = field(
        default="",
        metadata=setting(
            "Name that survives restarts, one per replica: the mesh sees only the newest of a name."
            " Empty: none."
        ),
    )
    http_host: str = field(
        default="127.0.0.1",
        metadata=setting("Address the OpenAI API binds; 0.0.0.0 in a container."),
    )
    http_port: int = field(
        default=8000, metadata=setting("Port of the OpenAI API; 0: any.", check=between(0, 65535))
    )
    request_timeout_s: float = field(
        default=600.0,
        metadata=setting(
            "Longest a request may take; above your longest answer.", check=at_least(1)
        ),
    )
    accept_timeout_s: float = field(
        default=3.0,
        metadata=setting(
            "Seconds a worker may take to accept before another is asked; above its worst stall.",
            check=at_least(0.05),
        ),
    )
    attempts_max: int = field(
        default=4,
        metadata=setting("Workers asked for one request, the first included.", check=at_least(1)),
    )
    body_limit_mb: int = field(
        default=45,
        metadata=setting(
            "Largest request body; raise it for very long prompts.", check=at_least(1)
        ),
    )
    requests_max: int = field(
        default=8192,
        metadata=setting(
            "Requests under way at once; above it clients get 503.", check=at_least(1)
        ),
    )
    kv_drift_max: float = field(
        default=0.1,
        metadata=setting(
            "Share of cached tokens predicted wrongly above which a worker's cache counts as "
            "unknown; raise it where many requests share a beginning and come at once.",
            check=between(0, 1),
        ),
    )
    keep_alive_s: float = field(
        default=15.0,
        metadata=setting(
            "Seconds of silence after which a stream gets an SSE comment; below the idle timeout "
            "of every proxy on the way to clients.",
            check=at_least(0.1),
        ),
    )
    metrics_prefix: str = field(
        default="kvmesh_frontend", metadata=setting("First part of metric names; match dashboards.")
    )

    def problems(self) -> list[str]:
        """See ServiceConfig."""
        found = ServiceConfig.problems(self)
        is_protected = self.mesh_token is not None or self.insecure
        if not is_loopback(self.http_host) and not is_protected:
            found.append(
                f"http_host: {self.http_host!r} is open to other hosts; "
                "set --mesh-token or --insecure"
            )
        return found
