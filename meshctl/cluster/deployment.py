"""A mesh as it shall run on a cluster: what `meshctl up` hands to the controller (pure)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from common.runtime.config import PREFIX, ServiceConfig, read_config
from meshctl.cluster.state import CPU, GPU, Desired, Needs
from meshctl.mesh_file.schema import MeshFile
from meshctl.options import UpOptions
from meshctl.process.rollout import fixed_port
from meshctl.services import ServiceSpec, build_service_specs, group_counts, worker_groups

# Of `meshctl up` on a terminal, and of consoles.
_NOT_STORED = frozenset(
    {"file", "check", "sample", "once", "then", "log_dir", "otlp_endpoint", "otlp_headers"}
)


# Any, here and below: JSON.
@dataclass(frozen=True, slots=True)
class Deployment:
    """The mesh of one namespace.

    - options: of `meshctl up`, without those that are secrets: `environ` has them, or the names of
      their files.
    - mesh: the mesh file.
    - environ: variables of meshctl that the services receive.
    """

    options: Mapping[str, Any]
    mesh: Mapping[str, Any]
    environ: Mapping[str, str]
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of members by group, in place of those of the options."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """How often members were asked to be replaced, by name."""
    drained: Sequence[str] = ()
    """Members that shall not run."""
    is_stopping: bool = False
    """Whether all members shall end."""

    def read_options(self) -> UpOptions:
        """Returns the options, with the secrets of the environment."""
        base, _ = read_config(ServiceConfig, None, self.environ, [], name="meshctl up")
        given = {name: getattr(base, name) for name in base.model_fields_set}
        return UpOptions.model_validate({**given, **self.options})

    def read_mesh(self) -> MeshFile:
        return MeshFile.model_validate(dict(self.mesh))

    def specs(self) -> dict[str, ServiceSpec]:
        """Returns the services that shall run, by name."""
        if self.is_stopping:
            return {}
        specs = build_service_specs(self.read_options(), self.read_mesh(), self.counts)
        return {spec.name: spec for spec in specs if spec.name not in self.drained}

    def group_counts(self) -> dict[str, int]:
        """Returns the desired number of members of each group."""
        return group_counts(self.read_options(), self.read_mesh(), self.counts)

    def follows_routers(self) -> bool:
        """Returns whether a group follows the recommended number of workers."""
        groups = worker_groups(self.read_options(), self.read_mesh())
        return any(group.scaling == "recommended" for group in groups)

    def scaled(self, counts: Mapping[str, int]) -> Deployment:
        """Returns the deployment with other numbers of members. Those of a group whose number
        changes are not drained any more."""
        drained = [name for name in self.drained if name.rpartition("-")[0] not in counts]
        return replace(self, counts={**self.counts, **counts}, drained=drained)

    def successor(self, newer: Deployment) -> Deployment:
        """Returns what a newer deployment of the same mesh becomes: groups that follow the routers
        keep their number, and requested replacements are not forgotten."""
        followed = {
            group.member_name
            for group in worker_groups(newer.read_options(), newer.read_mesh())
            if group.scaling == "recommended"
        }
        kept = {name: count for name, count in self.counts.items() if name in followed}
        return replace(newer, counts={**kept, **newer.counts}, restarts=self.restarts)


_DEPLOYMENT: TypeAdapter[Deployment] = TypeAdapter(Deployment)


def encode_deployment(deployment: Deployment) -> bytes:
    """Returns a deployment as JSON."""
    return _DEPLOYMENT.dump_json(deployment)


def decode_deployment(raw: bytes) -> Deployment:
    """Returns a deployment of `encode_deployment`. Raises ValidationError."""
    return _DEPLOYMENT.validate_json(raw)


def new_deployment(
    options: UpOptions, mesh: MeshFile, environ: Mapping[str, str], own: Mapping[str, str]
) -> Deployment:
    """Returns the deployment of a command line.

    - environ: what services receive of the environment of meshctl.
    - own: the environment of meshctl itself, with the shared settings of the mesh file.
    """
    secret = {name for name, info in UpOptions.model_fields.items() if not info.repr}
    excluded = set(_NOT_STORED) | secret
    settings = {name: value for name, value in own.items() if name.startswith(PREFIX)}
    return Deployment(
        options.model_dump(mode="json", exclude_unset=True, exclude=excluded),
        mesh.model_dump(mode="json", exclude_unset=True),
        {**environ, **settings},
    )


def desired_member(spec: ServiceSpec, deployment: Deployment) -> Desired:
    """Returns what a service needs of a cluster."""
    return Desired(
        spec.name,
        spec.group,
        spec.role,
        spec.drain_rank,
        spec.drain_s,
        _digest(spec, deployment),
        needs_of(spec),
        is_surge=spec.http_port is not None,
        has_fixed_port=bool(spec.http_port) or bool(fixed_port(spec, deployment.environ)),
    )


def needs_of(spec: ServiceSpec) -> Needs:
    """Returns what a service needs of its node."""
    resources = spec.resources
    amounts = {CPU: resources.cpus, GPU: resources.gpus, **resources.custom}
    return Needs(
        {name: amount for name, amount in amounts.items() if amount},
        resources.labels,
        resources.per_node,
        spec.model if spec.transfer_per_node else "",
    )


def spec_on_node(spec: ServiceSpec, address: str, environ: Mapping[str, str]) -> ServiceSpec:
    """Returns a service as it runs on a node: it binds the address of the node, which its peers
    connect to, unless its settings name others.

    environ: of the service beyond `spec.environ`.
    """
    variables = spec.with_environ(environ)
    prefix = f"{PREFIX}{spec.service.upper()}_"

    def is_set(name: str) -> bool:
        return any(variables.get(f"{start}{name}") for start in (prefix, PREFIX))

    args = [*spec.args]
    if not is_set("HOST"):
        args += ["--host", address]
    if not is_set("ADVERTISE_HOST"):
        args += ["--advertise-host", address]
    if spec.http_port is not None and not is_set("HTTP_HOST"):
        args += ["--http-host", address]
    if spec.transfer_per_node and not is_set("TRANSFER_GROUP"):
        args += ["--transfer-group", f"{spec.model}@{address}"]
    return replace(spec, args=tuple(args))


def _digest(spec: ServiceSpec, deployment: Deployment) -> str:
    """Returns a digest of what a service runs with. A number of its own for each request to
    replace it."""
    content = [
        spec.module,
        spec.args,
        sorted(spec.with_environ(deployment.environ).items()),
        spec.resources.model_dump(mode="json"),
        spec.transfer_per_node,
        deployment.restarts.get(spec.name, 0),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
