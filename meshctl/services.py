"""The services of a mesh as data: what to start, with which flags, and in which order they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshctl.options import UpOptions

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


def build_service_specs(options: UpOptions) -> list[ServiceSpec]:
    """Returns the services of a mesh in the order of display and start, without `--ready-fd`."""
    engine = ["--engine", options.engine, "--model-name", options.model_name]
    if options.model_path is not None:
        engine += ["--model-path", str(options.model_path)]
    if options.speedup is not None:
        engine += ["--speedup", f"{options.speedup:g}"]
    specs = [
        _build_spec(options, "frontend", i, ["--http-port", str(port)])
        for i, port in enumerate(http_ports(options))
    ]
    specs += [_build_spec(options, "router", i) for i in range(options.routers)]
    specs += [_build_spec(options, "indexer", i) for i in range(options.indexers)]
    for name, count, role in (
        ("worker", options.worker_count, []),
        ("prefill", options.prefill, ["--role", "prefill"]),
        ("decode", options.decode, ["--role", "decode"]),
    ):
        specs += [
            _build_spec(options, "worker", i, [*role, *engine], name=name) for i in range(count)
        ]
    return specs


def http_ports(options: UpOptions) -> list[int]:
    """Returns the HTTP port of each frontend; 0: any free port."""
    return [options.http_port and options.http_port + i for i in range(options.frontends)]


def _build_spec(
    options: UpOptions, kind: str, index: int, flags: Sequence[str] = (), *, name: str = ""
) -> ServiceSpec:
    name = f"{name or kind}-{index}"
    common = ["--namespace", options.namespace, "--registry", options.registry]
    if options.registry == "file":
        common += ["--registry-path", str(options.registry_path)]
    else:
        # A health port of its own answers Consul's checks while the event loop is busy.
        common += ["--consul-url", options.consul_url, "--health-port", "0"]
    common += ["--notice-s", f"{NOTICE_S:g}", "--drain-s", f"{options.drain_s:g}"]
    common += ["--stable-name", f"{options.name_prefix}{name}"]
    return ServiceSpec(
        name=name,
        module=f"{kind}_svc",
        args=(*common, *flags),
        drain_rank=_DRAIN_RANK[kind],
        drain_s=NOTICE_S + options.drain_s + STOP_MARGIN_S,
    )
