"""The services of a mesh as data: what to start, with which flags, and in which order they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Peers see a change of the file registry within 50 ms, so a short notice is enough on one host.
NOTICE_S = 0.3
# Seconds beyond notice and drain: the bounds of the other steps of the life cycle.
STOP_MARGIN_S = 10.0

# A service that sends work stops before the service that receives it: lower ranks first.
_DRAIN_RANK = {"frontend": 0, "router": 1, "worker": 2, "indexer": 3}


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to keep running: `python -m MODULE ARGS...`.

    name: unique in the mesh; the log is NAME.log. drain_rank: lower ranks are stopped first.
    drain_s: seconds from SIGTERM to SIGKILL.
    """

    name: str
    module: str
    args: tuple[str, ...]
    drain_rank: int
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """The shape of a mesh.

    workers: number of aggregated workers; prefill, decode: numbers of workers of these roles.
    http_port: port of the first frontend, counted up for the others; 0: any free port.
    model_path: a Hugging Face folder for sglang; None: a generated tiny model.
    speedup: factor of the sim engine's clock; None: its default. drain_s: limit for open streams.
    name_prefix: makes stable names unique if several hosts share a registry.
    """

    frontends: int = 1
    routers: int = 1
    indexers: int = 1
    workers: int = 2
    prefill: int = 0
    decode: int = 0
    engine: Literal["sim", "echo", "sglang"] = "sim"
    model_name: str = "sim"
    model_path: Path | None = None
    http_port: int = 8000
    namespace: str = "default"
    registry: Literal["file", "consul"] = "file"
    registry_path: Path = Path(".run/registry")
    consul_url: str = "http://127.0.0.1:8500"
    speedup: float | None = None
    drain_s: float = 10.0
    name_prefix: str = ""


def build_service_specs(options: MeshOptions) -> list[ServiceSpec]:
    """The services of a mesh in the order of display and start, without `--ready-fd`."""
    engine = ["--engine", options.engine, "--model-name", options.model_name]
    if options.model_path is not None:
        engine += ["--model-path", str(options.model_path)]
    if options.speedup is not None:
        engine += ["--speedup", f"{options.speedup:g}"]
    specs = [
        _build_spec(
            "frontend",
            i,
            options,
            [*_stable_name_flags(options, f"frontend-{i}"), "--http-port", f"{port}"],
        )
        for i, port in enumerate(http_ports(options))
    ]
    specs += [_build_spec("router", i, options, []) for i in range(options.routers)]
    specs += [_build_spec("indexer", i, options, []) for i in range(options.indexers)]
    for name, role, count in (
        ("worker", "aggregated", options.workers),
        ("prefill", "prefill", options.prefill),
        ("decode", "decode", options.decode),
    ):
        specs += [
            _build_spec(
                "worker",
                i,
                options,
                [*_stable_name_flags(options, f"{name}-{i}"), *_role_flags(role), *engine],
                name=name,
            )
            for i in range(count)
        ]
    return specs


def http_ports(options: MeshOptions) -> list[int]:
    """The HTTP port of each frontend; 0: any free port."""
    if options.http_port == 0:
        return [0] * options.frontends
    return [options.http_port + i for i in range(options.frontends)]


def _stable_name_flags(options: MeshOptions, name: str) -> list[str]:
    return ["--stable-name", f"{options.name_prefix}{name}"]


def _role_flags(role: str) -> list[str]:
    return [] if role == "aggregated" else ["--role", role]


def _common_flags(options: MeshOptions) -> list[str]:
    flags = ["--namespace", options.namespace, "--registry", options.registry]
    if options.registry == "file":
        flags += ["--registry-path", str(options.registry_path)]
    else:
        # A health port of its own answers Consul's checks while the event loop is busy.
        flags += ["--consul-url", options.consul_url, "--health-port", "0"]
    return [*flags, "--notice-s", f"{NOTICE_S:g}", "--drain-s", f"{options.drain_s:g}"]


def _build_spec(
    kind: str, index: int, options: MeshOptions, flags: Sequence[str], *, name: str = ""
) -> ServiceSpec:
    return ServiceSpec(
        name=f"{name or kind}-{index}",
        module=f"{kind}_svc",
        args=(*_common_flags(options), *flags),
        drain_rank=_DRAIN_RANK[kind],
        drain_s=NOTICE_S + options.drain_s + STOP_MARGIN_S,
    )
