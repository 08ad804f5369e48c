"""Network policies that permit connections, and nothing else (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import yaml

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

NAME: Final = {"app.kubernetes.io/name": "kvmesh"}
_COMPONENT: Final = "app.kubernetes.io/component"
_NAMESPACE: Final = "kubernetes.io/metadata.name"
_HEAD: Final = (
    "# python -m tools.kubernetes writes this file from tools/kubernetes/connections.py.\n"
)

# JSON of Kubernetes.
Json = dict[str, Any]


def policies_file(
    connections: Sequence[Connection], suffix: str = "", *, denies_others: bool = False
) -> str:
    """Returns a policy for each component that connections concern.

    suffix: of their names. denies_others: with one that applies to all pods and permits nothing.
    """
    found = [_policy("deny", {"matchLabels": NAME}, [], [])] if denies_others else []
    for component in _components(connections):
        ingress = [
            _rule("from", connection.source, connection.ports)
            for connection in connections
            if _is_in(component, connection.target)
        ]
        egress = [
            _rule("to", connection.target, connection.ports)
            for connection in connections
            if _is_in(component, connection.source)
        ]
        found.append(
            _policy(f"{component}{suffix}", _pods((component,)), _merged(ingress), _merged(egress))
        )
    return _HEAD + "---\n".join(yaml.safe_dump(policy, sort_keys=False) for policy in found)


def _components(connections: Iterable[Connection]) -> list[str]:
    """Returns the components of both sides, in the order of their first connection."""
    found: dict[str, None] = {}
    for connection in connections:
        for side in (connection.source, connection.target):
            if isinstance(side, Pods):
                found.update(dict.fromkeys(side.components))
    return list(found)


def _is_in(component: str, side: Peer) -> bool:
    return isinstance(side, Pods) and component in side.components


def _policy(name: str, selector: Json, ingress: list[Json], egress: list[Json]) -> Json:
    is_deny = not ingress and not egress
    types = ["Ingress"] * bool(ingress or is_deny) + ["Egress"] * bool(egress or is_deny)
    spec: Json = {"podSelector": selector, "policyTypes": types}
    spec |= {"ingress": ingress} if ingress else {}
    spec |= {"egress": egress} if egress else {}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


def _rule(direction: str, peer: Peer, ports: Sequence[Port]) -> Json:
    rule: Json = {}
    match peer:
        case Pods(components):
            rule[direction] = [{"podSelector": _pods(components)}]
        case Namespace(name, labels):
            selector: Json = {"namespaceSelector": {"matchLabels": {_NAMESPACE: name}}}
            selector |= {"podSelector": {"matchLabels": dict(labels)}} if labels else {}
            rule[direction] = [selector]
        case LabelledNamespaces(key, value):
            rule[direction] = [{"namespaceSelector": {"matchLabels": {key: value}}}]
        case OtherPods(key, value):
            rule[direction] = [{"podSelector": {"matchLabels": {key: value}}}]
        case Anywhere():
            pass
    if ports:
        rule["ports"] = [{"port": port.number, "protocol": port.protocol} for port in sorted(ports)]
    return rule


def _pods(components: Sequence[str]) -> Json:
    if len(components) == 1:
        return {"matchLabels": {**NAME, _COMPONENT: components[0]}}
    values = {"key": _COMPONENT, "operator": "In", "values": sorted(components)}
    return {"matchLabels": dict(NAME), "matchExpressions": [values]}


def _merged(rules: Iterable[Json]) -> list[Json]:
    """Returns rules with the same ports as one."""
    by_ports: Mapping[str, list[Json]] = defaultdict(list)
    for rule in rules:
        by_ports[str(rule.get("ports")) + str(rule.keys())].append(rule)
    merged = []
    for same in by_ports.values():
        first = dict(same[0])
        for direction in ("from", "to"):
            if direction in first:
                peers = [peer for rule in same for peer in rule[direction]]
                first[direction] = [p for n, p in enumerate(peers) if p not in peers[:n]]
        merged.append(first)
    return merged
