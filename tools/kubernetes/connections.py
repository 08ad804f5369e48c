"""Which pods of a mesh connect to which ports of others: the source of the network policies.

`make k8s-check` runs the rendered manifests as processes and compares their connections with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Protocol = Literal["TCP", "UDP"]


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """A port of a pod."""

    number: int
    protocol: Protocol = "TCP"


@dataclass(frozen=True, slots=True)
class Pods:
    """Pods of this mesh, by their components."""

    components: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Pods of another namespace. labels: of the pods; empty: all."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LabelledNamespaces:
    """Pods of the namespaces with a label."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class OtherPods:
    """Pods in the namespace of this mesh that do not belong to it, by a label."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Anywhere:
    """Any address, also outside of the cluster."""


Peer = Pods | Namespace | LabelledNamespaces | OtherPods | Anywhere


@dataclass(frozen=True, slots=True)
class Connection:
    """Connections from one side to ports of the other one. ports: none means all."""

    source: Peer
    target: Peer
    ports: tuple[Port, ...]
    purpose: str


GRPC: Final = Port(7000)
HEALTH: Final = Port(7001)
STREAMS: Final = Port(7002)
BOOTSTRAP: Final = Port(7003)
HTTP: Final = Port(8000)
OTLP: Final = Port(8071)
EXT_PROC: Final = Port(9002)
# The health of a picker, where gateways expect it.
PICKER_HEALTH: Final = Port(9003)
METRICS: Final = Port(9464)
CONSUL: Final = Port(8500)
RAFT: Final = Port(8300)
SERF: Final = (Port(8301), Port(8301, "UDP"))
DNS: Final = (Port(53), Port(53, "UDP"))

WORKERS: Final = ("prefill", "decode")
MEMBERS: Final = ("frontend", "router", "indexer", "batch", *WORKERS)
# The pods that this project's images run.
SERVICES: Final = (*MEMBERS, "console")

_FRONTEND, _ROUTER, _INDEXER = Pods(("frontend",)), Pods(("router",)), Pods(("indexer",))
_WORKERS, _MEMBERS, _SERVICES = Pods(WORKERS), Pods(MEMBERS), Pods(SERVICES)
_BATCH = Pods(("batch",))
_CONSOLE, _CONSUL = Pods(("console",)), Pods(("consul",))
_NAMES = Namespace("kube-system", (("k8s-app", "kube-dns"),))

# By what brings them about: each group is a file of policies.
MESH: Final = (
    Connection(Anywhere(), _FRONTEND, (HTTP,), "requests of clients"),
    Connection(_FRONTEND, _ROUTER, (STREAMS,), "sessions: placements and bookings"),
    Connection(_FRONTEND, _WORKERS, (STREAMS,), "requests and tokens"),
    Connection(_FRONTEND, _WORKERS, (GRPC,), "large files of models"),
    Connection(_FRONTEND, _FRONTEND, (GRPC,), "stored responses"),
    Connection(_FRONTEND, _BATCH, (GRPC,), "files and batches"),
    Connection(_BATCH, _FRONTEND, (GRPC,), "lines of batches"),
    Connection(_ROUTER, _ROUTER, (STREAMS,), "replication of bookings and sessions"),
    Connection(_ROUTER, _INDEXER, (STREAMS,), "the index"),
    Connection(_WORKERS, _INDEXER, (STREAMS,), "KV events and load"),
    Connection(_INDEXER, _WORKERS, (GRPC,), "verification of the index"),
    Connection(_ROUTER, _FRONTEND, (GRPC,), "acknowledgement of a router"),
    Connection(_INDEXER, _ROUTER, (GRPC,), "acknowledgement of an indexer"),
    Connection(_WORKERS, Pods(("frontend", "router")), (GRPC,), "acknowledgement of a worker"),
    Connection(Pods(("decode",)), Pods(("prefill",)), (BOOTSTRAP,), "handoff of KV"),
    Connection(_SERVICES, _MEMBERS, (HEALTH,), "probe of a member that the registry suspects"),
    Connection(_MEMBERS, _CONSOLE, (OTLP,), "spans"),
    Connection(_CONSOLE, _MEMBERS, (GRPC, METRICS), "what the console and meshctl show"),
    Connection(_CONSOLE, _FRONTEND, (HTTP,), "chats of the playground"),
    Connection(_SERVICES, _NAMES, DNS, "names of services"),
)
REGISTRY: Final = (
    Connection(_SERVICES, _CONSUL, (CONSUL,), "the registry"),
    Connection(_CONSUL, _MEMBERS, (HEALTH,), "checks of the members"),
    Connection(_CONSUL, _CONSUL, (RAFT,), "the log of the servers"),
    Connection(_CONSUL, _CONSUL, SERF, "gossip of the servers"),
    Connection(_CONSUL, _NAMES, DNS, "names of the servers"),
)
EXISTING_REGISTRY: Final = (
    Connection(_SERVICES, Namespace("consul"), (CONSUL, Port(8501)), "the registry"),
    Connection(Namespace("consul"), _MEMBERS, (HEALTH,), "checks of the members"),
)
MONITORING: Final = (
    Connection(Namespace("monitoring"), _SERVICES, (METRICS,), "metrics for Prometheus"),
)
# The transfer engine of SGLang listens on ports that the system chooses.
SGLANG: Final = (Connection(_WORKERS, _WORKERS, (), "transfer of KV between engines"),)
_PICKER, _ADAPTER = Pods(("picker",)), Pods(("adapter",))
_OF_GATEWAY = Pods(("picker", "adapter"))
# The pods of deploy/kubernetes/overlays/gateway.
_BESIDE = ("frontend", "router", "indexer", "batch")
_ALL = Pods((*_BESIDE, "console", "picker", "adapter"))
GATEWAYS: Final = LabelledNamespaces("kvmesh.io/gateway", "true")
MODEL_SERVERS: Final = OtherPods("app", "model-server")
GATEWAY: Final = (
    Connection(GATEWAYS, _PICKER, (EXT_PROC, PICKER_HEALTH), "picks and health for gateways"),
    Connection(_PICKER, _ROUTER, (STREAMS,), "sessions of pickers"),
    # The workers of an adapter listen on ports that the system chooses.
    Connection(_ALL, _ADAPTER, (), "all that peers request of a worker"),
    Connection(_CONSUL, _ADAPTER, (), "checks of the workers of an adapter"),
    Connection(_ADAPTER, MODEL_SERVERS, (), "requests to model servers, their KV events"),
    Connection(_ADAPTER, _INDEXER, (STREAMS,), "KV events and load of model servers"),
    Connection(
        _ADAPTER, Pods(("frontend", "router", "picker")), (GRPC,), "acknowledgement of a server"
    ),
    Connection(_ROUTER, _PICKER, (GRPC,), "acknowledgement of a router by a picker"),
    Connection(
        Pods(("frontend", "picker")), Pods(("frontend", "picker")), (GRPC,), "recent requests"
    ),
    Connection(_ALL, _PICKER, (PICKER_HEALTH,), "probe of a picker that the registry suspects"),
    Connection(_CONSUL, _PICKER, (PICKER_HEALTH,), "checks of the pickers"),
    Connection(_OF_GATEWAY, Pods(_BESIDE), (HEALTH,), "probe of a member by a picker or adapter"),
    Connection(_OF_GATEWAY, _CONSUL, (CONSUL,), "the registry of pickers and adapters"),
    Connection(_OF_GATEWAY, _CONSOLE, (OTLP,), "spans of pickers and adapters"),
    Connection(_CONSOLE, _PICKER, (GRPC, METRICS), "what the console shows of pickers"),
    Connection(Namespace("monitoring"), _PICKER, (METRICS,), "metrics of pickers for Prometheus"),
    Connection(Namespace("monitoring"), _ADAPTER, (), "metrics of model servers for Prometheus"),
    Connection(_OF_GATEWAY, _NAMES, DNS, "names of services and model servers"),
)
