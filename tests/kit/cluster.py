"""A cluster of fake nodes, on which the controller of a mesh starts fake replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.runtime.config import read_config
from meshctl.cluster.controller import Controller, RunnerError
from meshctl.cluster.deployment import Deployment, new_deployment
from meshctl.cluster.recommended import Recommendation
from meshctl.cluster.reconcile import observed_start
from meshctl.cluster.state import CPU, Desired, Needs, Node, Observed, Phase, Start
from meshctl.mesh_file.document import read_document
from meshctl.mesh_file.load import LoadedMesh
from meshctl.mesh_file.schema import MeshFile, parse_mesh_file
from meshctl.options import UpOptions
from meshctl.services import ServiceSpec

START_S = 4.0
DRAIN_S = 3.0
STOP_S = 20.0


def node(number: int, cpus: float = 8.0, **labels: str) -> Node:
    return Node(f"n{number}", f"10.0.0.{number}", {CPU: cpus}, labels)


def desired(name: str, role: str = "worker", *, cpus: float = 1.0, digest: str = "a") -> Desired:
    ranks = {"frontend": 0, "router": 1, "worker": 2, "indexer": 3}
    group = name.rpartition("-")[0]
    return Desired(
        name,
        group,
        role,
        ranks[role],
        STOP_S,
        digest,
        Needs({CPU: cpus}),
        is_surge=role == "frontend",
    )


def replica(of: Desired, on: Node, number: int = 1, phase: Phase = Phase.ROUTABLE) -> Observed:
    return replace(observed_start(Start(of, on, number)), phase=phase, pid=100 + number)


def deployment(text: str, **options: object) -> Deployment:
    """Returns the deployment of a mesh file with the text. options: of the command line."""
    document = read_document("mesh.yaml", text)
    loaded = LoadedMesh(document, parse_mesh_file(document))
    read, _ = read_config(UpOptions, None, {}, ["--on=ray", *loaded.option_flags([])])
    return new_deployment(read.model_copy(update=options), loaded.mesh, {}, {})


def mesh(text: str) -> MeshFile:
    return parse_mesh_file(read_document("mesh.yaml", text))


@dataclass
class FakeReplica:
    """A replica that is routable START_S after its start."""

    observed: Observed
    started_at: float
    stop_at: float | None = None
    is_dead: bool = False
    is_silent: bool = False

    def observe(self, now: float) -> Observed:
        phase = self.observed.phase
        if phase is Phase.STARTING and now >= self.started_at + START_S:
            phase = Phase.ROUTABLE
        if self.stop_at is not None and phase is not Phase.FAILED:
            phase = Phase.STOPPED if now >= self.stop_at else Phase.STOPPING
        found = replace(self.observed, phase=phase, is_dead=self.is_dead, pid=1)
        # As for the adapter: an old state, and how old it is.
        return replace(found, silent_s=now) if self.is_silent else found


@dataclass
class FakeCluster:
    """A `Runner`. log: what the controller did, in order. fails: whether a start of a member
    fails."""

    live: dict[str, Node]
    fails: Callable[[str], bool] = lambda _: False
    replicas_by_id: dict[str, FakeReplica] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    stored: bytes = b""
    requested: list[Sequence[Needs]] = field(default_factory=list)
    is_reachable: bool = True

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def nodes(self) -> Sequence[Node]:
        if not self.is_reachable:
            raise RunnerError("the head does not respond")
        return list(self.live.values())

    async def replicas(self) -> Sequence[Observed]:
        return [fake.observe(self.now()) for fake in self.replicas_by_id.values()]

    async def start(self, start: Start, spec: ServiceSpec, deployment: Deployment) -> None:
        observed = observed_start(start)
        assert observed.id not in self.replicas_by_id
        assert spec.name == start.desired.name
        if self.fails(spec.name):
            observed = replace(observed, phase=Phase.FAILED, detail="no such model")
        self.replicas_by_id[observed.id] = FakeReplica(observed, self.now())
        self.log.append(f"start {observed.id} on {start.node.id}")

    async def stop(self, replica: Observed) -> None:
        self.replicas_by_id[replica.id].stop_at = self.now() + DRAIN_S
        self.log.append(f"stop {replica.id}")

    async def forget(self, replica: Observed) -> None:
        del self.replicas_by_id[replica.id]
        self.log.append(f"forget {replica.id}")

    async def save(self, raw: bytes) -> None:
        self.stored = raw

    async def load(self) -> bytes:
        return self.stored

    async def request_nodes(self, needs: Sequence[Needs]) -> None:
        self.requested.append(needs)

    def kill_node(self, node_id: str, *, is_noticed: bool) -> None:
        """All replicas of a node stop responding. is_noticed: the cluster counts it as dead."""
        if is_noticed:
            del self.live[node_id]
        for fake in self.replicas_by_id.values():
            if fake.observed.node_id == node_id:
                fake.is_silent = True

    async def counts(self) -> Mapping[str, int]:
        """Returns the number of routable replicas of each group."""
        found: dict[str, int] = {}
        for observed in await self.replicas():
            if observed.phase is Phase.ROUTABLE and not observed.is_unreachable:
                found[observed.group] = found.get(observed.group, 0) + 1
        return found


def cluster(*nodes: Node) -> FakeCluster:
    return FakeCluster({one.id: one for one in nodes or (node(1), node(2), node(3))})


def controller_of(
    fake: FakeCluster, recommended: Callable[[], Iterable[Recommendation]] = tuple
) -> Controller:
    async def read(_: Deployment, __: Sequence[Observed]) -> Iterable[Recommendation]:
        return recommended()

    return Controller(fake, read, clock=asyncio.get_running_loop().time)
