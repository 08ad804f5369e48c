"""The services of a mesh as data: what to start, with which flags, and in which order they end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from common.errors import InvalidRequest
from common.runtime.suggestion import suggest
from meshctl.mesh_file.document import KeyPath, MeshFileError, key_text
from meshctl.mesh_file.schema import (
    Adapter,
    ConsoleSection,
    FrontendSection,
    MeshFile,
    ReplicatedSection,
    Resources,
    ServiceSection,
    WorkerGroup,
    WorkerOverride,
    find_adapter_problems,
)
from meshctl.mesh_file.settings import PORTS, Variables, service_prefix, with_variables
from meshctl.options import NO_WORKERS, UpOptions

# Peers see a change of the file registry within 50 ms, so a short notice is enough on one host.
NOTICE_S = 0.3
# On several hosts.
CLUSTER_NOTICE_S = 2.0
# Seconds beyond notice and drain: the bounds of the other steps of the life cycle.
STOP_MARGIN_S = 10.0

# A service that sends work stops before the service that receives it: lower ranks first.
_DRAIN_RANK = {
    "batch": 0,
    "frontend": 1,
    "epp": 1,
    "router": 2,
    "worker": 3,
    "indexer": 4,
    "console": 5,
}
# Keys of the mesh file that are not the name of a service and an s.
_SECTIONS = {"batch": "batches", "epp": "pickers"}
_NO_FILE = MeshFile()
NO_RESOURCES = Resources()
# Most members of a group.
GROUP_MAX = 10_000
# Of `build_service_specs`.
NO_COUNTS: Mapping[str, int] = MappingProxyType({})
# The flag that counts the workers of a role.
_COUNTS = {"aggregated": "workers", "prefill": "prefill", "decode": "decode"}


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
    role: str = ""
    """What its members can replace each other in: `router`, `prefill worker of qwen`."""
    model: str = ""
    """Of a worker: what clients call it."""
    engine: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables beyond those of meshctl."""
    http_port: int | None = None
    """HTTP port of a frontend, on which meshctl listens for it; 0: any."""
    binds_port: bool = False
    """Whether its process binds `http_port`: its version takes no sockets of meshctl."""
    is_observer: bool = False
    """The mesh is ready, and goes on, without it: no member sends it work."""
    resources: Resources = NO_RESOURCES
    """What it needs of a node of a cluster."""
    transfer_per_node: bool = False
    """See `WorkerGroup`."""
    origins: Mapping[str, KeyPath] = field(default_factory=dict)
    """Key of the mesh file that a flag or variable is from."""

    @property
    def service(self) -> str:
        """The service: `worker`."""
        return self.module.removesuffix("_svc")

    @property
    def group(self) -> str:
        """The members that differ from it by their number only: `router`, `prefill`."""
        return self.name.rpartition("-")[0]

    def with_environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of the process: a setting of the mesh file has precedence."""
        return with_variables(inherited, self.environ)


def build_service_specs(
    options: UpOptions, mesh: MeshFile = _NO_FILE, counts: Mapping[str, int] = NO_COUNTS
) -> list[ServiceSpec]:
    """Returns the services of a mesh in the order of display and start, without `--ready-fd`.

    - mesh: what a mesh file has beyond the options.
    - counts: by group, in place of those of options and file.

    Raises MeshFileError if a flag does not fit the mesh file.
    """
    frontends = counts.get("frontend", options.frontends)
    specs = [
        _build_spec(options, "frontend", i, ["--http-port", str(port)], mesh, http_port=port)
        for i, port in enumerate(http_ports(options, frontends))
    ]
    routers = counts.get("router", options.routers)
    specs += [_build_spec(options, "router", i, (), mesh) for i in range(routers)]
    indexers = counts.get("indexer", options.indexers)
    specs += [_build_spec(options, "indexer", i, (), mesh) for i in range(indexers)]
    groups = worker_groups(options, mesh)
    # Flags may have changed engine and model.
    if problems := list(find_adapter_problems(mesh.adapters, groups)):
        raise MeshFileError(
            [f"{key_text(path)}: with the flags, {text}" for path, text in problems]
        )
    for number, group in enumerate(groups):
        flags = ["--role", group.role] if group.role != "aggregated" else []
        flags += ["--engine", group.engine, "--model-name", group.model]
        if group.model_path is not None:
            flags += ["--model-path", str(group.model_path)]
        if options.speedup is not None:
            flags += ["--speedup", f"{options.speedup:g}"]
        specs += [
            _build_spec(options, "worker", i, flags, mesh, group=group, number=number)
            for i in range(counts.get(group.member_name, group.count))
        ]
    pickers = counts.get("epp", options.pickers)
    specs += [_build_spec(options, "epp", i, (), mesh) for i in range(pickers)]
    batches = counts.get("batch", options.batches)
    specs += [_build_spec(options, "batch", i, (), mesh) for i in range(batches)]
    if options.consoles:
        ports = ["--http-port", str(options.console_port)]
        ports += ["--otlp-port", str(options.console_otlp_port)]
        specs.append(_build_spec(options, "console", 0, ports, mesh))
    return specs


def worker_groups(options: UpOptions, mesh: MeshFile = _NO_FILE) -> Sequence[WorkerGroup]:
    """Returns the groups of workers. Raises MeshFileError if a flag does not fit the mesh file."""
    values = {
        "engine": options.engine,
        "model": options.model_name,
        "model_path": options.model_path,
    }
    if not mesh.workers:
        if not options.has_workers:
            raise MeshFileError([f"--workers: {NO_WORKERS}"])
        counts = {
            "aggregated": options.worker_count,
            "prefill": options.prefill,
            "decode": options.decode,
        }
        return [
            WorkerGroup.model_validate({"role": role, "count": count, **values})
            for role, count in counts.items()
            if count
        ]
    names = {"engine": "engine", "model": "model_name", "model_path": "model_path"}
    given = options.model_fields_set
    update = {key: values[key] for key, name in names.items() if name in given}
    groups = [group.model_copy(update=update) for group in mesh.workers]
    for role, flag in _COUNTS.items():
        if flag not in given:
            continue
        of_role = [i for i, group in enumerate(groups) if group.role == role]
        count: int = getattr(options, flag) or 0
        if len(of_role) != 1 or not count:
            raise MeshFileError(
                [
                    f"--{flag}: the mesh file has {len(of_role)} groups with the role {role}, and"
                    " the flag replaces the count of one; set the counts in the file"
                ]
            )
        groups[of_role[0]] = groups[of_role[0]].model_copy(update={"count": count})
    return groups


def http_ports(options: UpOptions, count: int) -> list[int]:
    """Returns the HTTP port of each frontend; 0: any free port."""
    return [options.http_port and options.http_port + i for i in range(count)]


def group_counts(
    options: UpOptions, mesh: MeshFile = _NO_FILE, counts: Mapping[str, int] = NO_COUNTS
) -> dict[str, int]:
    """Returns the number of members of each group. Raises MeshFileError as `build_service_specs`.

    counts: as there.
    """
    found = {
        "frontend": options.frontends,
        "router": options.routers,
        "indexer": options.indexers,
        "batch": options.batches,
        "epp": options.pickers,
        **{group.member_name: group.count for group in worker_groups(options, mesh)},
    }
    return {name: counts.get(name, count) for name, count in found.items()}


def check_counts(present: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """Raises InvalidRequest if a mesh cannot have other numbers of members.

    present: those of all groups.
    """
    if not wanted:
        raise InvalidRequest(f"name a group and its number: {next(iter(present))}=2", "counts")
    for name, count in wanted.items():
        if name not in present:
            raise InvalidRequest(f"{name!r}: no such group{suggest(name, present)}", "counts")
        least = 1 if name in ("frontend", "router") else 0
        if not least <= count <= GROUP_MAX:
            raise InvalidRequest(
                f"{name}={count}: must be between {least} and {GROUP_MAX}", "counts"
            )


def find_port_problems(specs: Sequence[ServiceSpec]) -> Iterator[tuple[KeyPath, str]]:
    """Yields the keys of the mesh file that give one port to several processes."""
    ports = [
        (spec.origins[variable], spec.environ[variable])
        for spec in specs
        for name in PORTS
        for variable in [f"{service_prefix(spec.module.removesuffix('_svc'))}{name.upper()}"]
        if spec.environ.get(variable, "0") not in ("", "0")
    ]
    for (origin, _), count in Counter(ports).items():
        if count > 1:
            yield origin, "several processes on one host cannot have one port; use 0"


def process_count(spec: ServiceSpec, environ: Mapping[str, str]) -> int:
    """Returns how many processes of a frontend share its port (see `FrontendConfig.processes`).

    environ: of meshctl.
    """
    text = spec.with_environ(environ).get(f"{service_prefix('frontend')}PROCESSES", "")
    return int(text) if spec.http_port is not None and text.isdecimal() else 1


def _build_spec(
    options: UpOptions,
    kind: str,
    index: int,
    flags: Sequence[str],
    mesh: MeshFile,
    *,
    group: WorkerGroup | None = None,
    number: int = 0,
    http_port: int | None = None,
) -> ServiceSpec:
    """number: of the group in the mesh file."""
    name = f"{kind if group is None else group.member_name}-{index}"
    variables = _variables(kind, index, mesh, group, number)
    if kind == "epp":
        # A variable, by which a rolling restart sees that two processes cannot have it.
        port = options.ext_proc_port and options.ext_proc_port + index
        variable = f"{service_prefix(kind)}EXT_PROC_PORT"
        variables.put(variable, str(port), ("pickers", "ext_proc_port"))
    common = ["--namespace", options.namespace, "--registry", options.registry]
    if options.registry == "file":
        common += ["--registry-path", str(options.registry_path)]
    else:
        common += ["--consul-url", options.consul_url]
        if f"{service_prefix(kind)}HEALTH_PORT" not in variables.values:
            # A health port of its own answers Consul's checks while the event loop is busy.
            common += ["--health-port", "0"]
    notice_s = NOTICE_S if options.on == "local" else CLUSTER_NOTICE_S
    common += ["--notice-s", f"{notice_s:g}", "--drain-s", f"{options.drain_s:g}"]
    common += ["--stable-name", f"{options.name_prefix}{name}"]
    if options.consoles and options.console_otlp_port and kind != "console":
        _add_collector(variables, service_prefix(kind), options)
    if mesh.require:
        common += ["--required-roles", ",".join(mesh.require)]
    variables.origins["--required-roles"] = ("require",)
    role, section = kind, _section(kind, mesh) if group is None else group
    if group is not None:
        role = f"{group.role} worker of {group.model}"
        at: KeyPath = ("workers", number)
        variables.origins |= {
            "--engine": (*at, "engine"),
            "--model-path": (*at, "model_path"),
            "--model-name": (*at, "model"),
            "--role": (*at, "role"),
        }
    return ServiceSpec(
        name=name,
        module=f"{kind}_svc",
        args=(*common, *flags),
        drain_rank=_DRAIN_RANK[kind],
        drain_s=notice_s + options.drain_s + STOP_MARGIN_S,
        role=role,
        model="" if group is None else group.model,
        engine="" if group is None else group.engine,
        environ=variables.values,
        http_port=http_port,
        is_observer=kind == "console",
        resources=section.resources if isinstance(section, ReplicatedSection) else NO_RESOURCES,
        transfer_per_node=group is not None and group.transfer_per_node,
        origins=variables.origins,
    )


def _section(kind: str, mesh: MeshFile) -> ServiceSection:
    """Returns the section of a service other than a worker."""
    sections: Mapping[str, ServiceSection] = {
        "frontend": mesh.frontends,
        "router": mesh.routers,
        "indexer": mesh.indexers,
        "batch": mesh.batches,
        "epp": mesh.pickers,
        "console": mesh.consoles,
    }
    return sections[kind]


def section_key(kind: str) -> str:
    """Returns the key of a service in a mesh file."""
    return _SECTIONS.get(kind, f"{kind}s")


def _variables(
    kind: str, index: int, mesh: MeshFile, group: WorkerGroup | None, number: int
) -> Variables:
    """Returns the variables that the mesh file sets for a process."""
    prefix = service_prefix(kind)
    variables = Variables()
    variables.add((), mesh, prefix)
    if group is None:
        section = _section(kind, mesh)
        variables.add((section_key(kind),), section, prefix)
        if (
            isinstance(section, FrontendSection | ConsoleSection)
            and "http_host" in section.model_fields_set
        ):
            variables.put(f"{prefix}HTTP_HOST", section.http_host, (section_key(kind), "http_host"))
        return variables
    path: KeyPath = ("workers", number)
    layers: list[tuple[KeyPath, WorkerOverride]] = [(path, group)]
    if index < len(group.each):
        layers.append(((*path, "each", index), group.each[index]))
    for at, layer in layers:
        variables.add(at, layer, prefix)
        if layer.engine_args:
            variables.put(f"{prefix}ENGINE_ARGS", layer.engine_args, (*at, "engine_args"))
    adapters = [adapter for adapter in mesh.adapters if adapter.model == group.model]
    if adapters:
        _add_adapters(variables, prefix, group.engine, adapters)
    return variables


def _add_collector(variables: Variables, prefix: str, options: UpOptions) -> None:
    """Adds the OTLP receiver of the console to the collectors of a service. Headers for all of
    them, which may be secrets, are not meant for it; then nothing is added."""
    name = f"{prefix}OTLP_ENDPOINT"
    others = variables.values.get(name) or ",".join(options.otlp_endpoint)
    own = f"http://127.0.0.1:{options.console_otlp_port}"
    has_headers = f"{prefix}OTLP_HEADERS" in variables.values
    if has_headers or not all(header.endpoint for header in options.otlp_headers):
        return
    if own not in others.split(","):
        endpoints = ",".join(filter(None, (others, own)))
        variables.put(name, endpoints, variables.origins.get(name, ("consoles",)))


def _add_adapters(
    variables: Variables, prefix: str, engine: str, adapters: Sequence[Adapter]
) -> None:
    """Adds the settings by which an engine loads adapters at its start, before it is routable, and
    can load those with `copies` later."""
    at_start = [adapter for adapter in adapters if adapter.copies is None]
    if engine != "sglang":
        if not at_start:
            return
        name, origin = f"{prefix}LORAS", ("adapters",)
        others = variables.values.get(name, "")
        names = [*filter(None, [others]), *(adapter.name for adapter in at_start)]
        variables.put(name, ",".join(names), origin)
        return
    name = f"{prefix}ENGINE_ARGS"
    arguments = json.loads(variables.values.get(name) or "{}")
    paths = {adapter.name: adapter.uri.removeprefix("file://") for adapter in at_start}
    arguments = {**arguments, "enable_lora": True, **({"lora_paths": paths} if paths else {})}
    variables.put(name, json.dumps(arguments), variables.origins.get(name, ("adapters",)))
