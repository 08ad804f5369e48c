"""The services of a mesh as data: what to start, with which flags, and in which order they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Peers see a file registry's change within 50 ms: the notice of a mesh on one host can be short.
NOTICE_S = 0.3
# What a service may take beyond its notice and drain: the bounds of its lifecycle's other steps.
STOP_MARGIN_S = 10.0

# Who takes work ends before who does it. A service of one rank waits for all of lower ones.
_DRAIN_RANK = {"frontend": 0, "router": 1, "worker": 2, "indexer": 3}


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to keep running: `python -m MODULE ARGS...`.

    name: unique in the mesh; the log is NAME.log. drain_rank: lower ranks are stopped first.
    drain_s: seconds from SIGTERM until it is killed.
    """

    name: str
    module: str
    args: tuple[str, ...]
    drain_rank: int
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """What kind of mesh is wanted.

    workers: aggregated ones; prefill, decode: workers of these roles, beside or instead of them.
    http_port: of the first frontend, the others get the ones after it; 0: any.
    model_path: a Hugging Face folder for sglang, None = its own tiny model.
    speedup: of the sim engine's clock, None = its default. drain_s: seconds streams may take.
    name_prefix: makes stable names unique where several hosts share a registry.
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
    """The services of a mesh, in the order in which they are shown and started.

    `--ready-fd` is not among the flags: it is the launcher's to add.
    """
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
    """The HTTP port of each frontend; 0: any."""
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
        # Its checks come in time also while an event loop is busy.
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
