"""What the network policies of rendered manifests permit, beside what the mesh needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.kubernetes.manifests import NAMESPACE, Json, Manifests, selects
from tools.kubernetes import connections
from tools.kubernetes.connections import (
    Anywhere,
    Connection,
    LabelledNamespaces,
    Namespace,
    OtherPods,
    Peer,
    Pods,
    Port,
)

_NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
_OF_OTHERS: Final = {connections.HEALTH, connections.METRICS}
# A port that no pod of a mesh serves.
OTHER: Final = Port(22)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod, or an address outside of the cluster. component: "": not of this mesh."""

    name: str
    component: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)


OUTSIDE: Final = Endpoint("outside")
STRANGER: Final = Endpoint("a pod of another namespace", namespace="other", labels={"app": "x"})


def needed(manifests: Manifests) -> tuple[Connection, ...]:
    """Returns the connections of a mesh with these manifests."""
    has_consul = "consul" in manifests.names("StatefulSet")
    is_sglang = any(pod.target == "worker-sglang" for pod in manifests.pods)
    return (
        *connections.MESH,
        *(connections.REGISTRY if has_consul else connections.EXISTING_REGISTRY),
        *(connections.MONITORING if manifests.names("PodMonitor") else ()),
        *(connections.SGLANG if is_sglang else ()),
        *(connections.GATEWAY if manifests.names("InferencePool") else ()),
    )


def find_problems(manifests: Manifests) -> list[str]:
    """Returns each connection that is permitted and not needed, or the other way round."""
    policies = list(manifests.of_kind("NetworkPolicy"))
    wanted = needed(manifests)
    pods = [
        Endpoint(pod.name, pod.component, NAMESPACE, dict(pod.labels)) for pod in manifests.pods
    ]
    others = [OUTSIDE, STRANGER, *_others(wanted)]
    ports = sorted({OTHER, *(port for connection in wanted for port in connection.ports)})
    found = []
    for source, target in (*_pairs(pods, pods), *_pairs(others, pods), *_pairs(pods, others)):
        for port in ports:
            is_needed = any(_is_of(c, source, target, port) for c in wanted)
            is_permitted = permits(policies, source, target, port)
            if is_needed != is_permitted:
                state = "is refused" if is_needed else "is permitted and not needed"
                found.append(f"{source.name} to {target.name}:{port.number} {state}")
    return found


def undeclared_ports(manifests: Manifests) -> list[str]:
    """Returns ports that the table has and no pod declares, or the other way round. Health and
    metrics of the console are for its node, and for Prometheus if there is one."""
    found = []
    for pod in manifests.pods:
        declared = {
            Port(port["containerPort"], port.get("protocol", "TCP")) for port in pod.ports.values()
        }
        to_pod = [
            connection
            for connection in needed(manifests)
            if isinstance(connection.target, Pods) and pod.component in connection.target.components
        ]
        expected = {port for connection in to_pod for port in connection.ports}
        others = declared - expected - _OF_OTHERS
        is_open = any(not connection.ports for connection in to_pod)
        if not expected <= declared or (others and not is_open):
            found.append(f"{pod.name} declares {sorted(declared)}, not {sorted(expected)}")
    return found


def permits(policies: Sequence[Json], source: Endpoint, target: Endpoint, port: Port) -> bool:
    """Returns whether policies permit a connection, as Kubernetes applies them."""
    return _permits_side(policies, source, target, port, "Egress") and _permits_side(
        policies, target, source, port, "Ingress"
    )


def _permits_side(
    policies: Sequence[Json], pod: Endpoint, other: Endpoint, port: Port, kind: str
) -> bool:
    if pod.namespace != NAMESPACE:
        return True  # No policy of ours applies to it.
    specs = [
        policy["spec"]
        for policy in policies
        if kind in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    direction = "to" if kind == "Egress" else "from"
    rules = (rule for spec in specs for rule in spec.get(kind.lower(), []))
    return not specs or any(_permits_rule(rule, direction, other, port) for rule in rules)


def _permits_rule(rule: Json, direction: str, other: Endpoint, port: Port) -> bool:
    ports = rule.get("ports", [])
    has_port = not ports or any(Port(entry["port"], entry["protocol"]) == port for entry in ports)
    peers = rule.get(direction)
    return has_port and (peers is None or any(_is_peer(peer, other) for peer in peers))


def _is_peer(peer: Json, other: Endpoint) -> bool:
    if other is OUTSIDE:
        return False  # No rule of ours has an ipBlock.
    names = {_NAMESPACE_LABEL: other.namespace, **other.namespace_labels}
    in_namespace = (
        selects(peer["namespaceSelector"], names)
        if "namespaceSelector" in peer
        else other.namespace == NAMESPACE
    )
    return in_namespace and selects(peer.get("podSelector", {}), other.labels)


def _others(wanted: Iterable[Connection]) -> Iterator[Endpoint]:
    """Yields a pod of each peer that does not belong to the mesh."""
    sides = (side for one in wanted for side in (one.source, one.target))
    for side in dict.fromkeys(sides):
        match side:
            case Namespace(name, labels):
                yield Endpoint(f"namespace {name}", namespace=name, labels=dict(labels))
            case LabelledNamespaces(key, value):
                text = f"a pod of a namespace with {key}"
                yield Endpoint(text, namespace="labelled", namespace_labels={key: value})
            case OtherPods(key, value):
                yield Endpoint(f"a pod with {key}", namespace=NAMESPACE, labels={key: value})


def _pairs(
    sources: Sequence[Endpoint], targets: Sequence[Endpoint]
) -> Iterator[tuple[Endpoint, Endpoint]]:
    return ((source, target) for source in sources for target in targets)


def _is_of(connection: Connection, source: Endpoint, target: Endpoint, port: Port) -> bool:
    has_port = not connection.ports or port in connection.ports
    return has_port and _is_side(connection.source, source) and _is_side(connection.target, target)


def _is_side(side: Peer, endpoint: Endpoint) -> bool:
    match side:
        case Pods(components):
            return endpoint.component in components
        case Namespace(name, labels):
            return endpoint.namespace == name and dict(labels).items() <= endpoint.labels.items()
        case LabelledNamespaces(key, value):
            return endpoint.namespace_labels.get(key) == value
        case OtherPods(key, value):
            return endpoint.namespace == NAMESPACE and endpoint.labels.get(key) == value
        case Anywhere():
            return not endpoint.component
