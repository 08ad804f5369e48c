"""On which node a replica runs (pure).

Replicas of one role are spread: over as many nodes as there are, so that the loss of a node leaves
the role with members. Ray's own strategy SPREAD spreads all actors together, and may put the two
routers of a mesh on one node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from meshctl.cluster.state import Desired, Needs, Node, Observed

# Ray counts resources in units of 1/10,000.
EPSILON = 1e-4


def choose_node(
    desired: Desired,
    nodes: Iterable[Node],
    replicas: Sequence[Observed],
    avoided: Collection[str] = (),
) -> Node | str:
    """Returns the node for a replica, or the reason why none fits.

    - replicas: all that have not ended; each occupies its node.
    - avoided: ids of nodes that are taken only if no other one fits.
    """
    found, reasons = [], []
    for node in nodes:
        on_node = [replica for replica in replicas if replica.node_id == node.id]
        if reason := _find_obstacle(desired, node, on_node):
            reasons.append(f"{node.address}: {reason}")
        else:
            found.append((node.id in avoided, *_order(desired, on_node), node.id, node))
    if found:
        return min(found, key=lambda entry: entry[:-1])[-1]
    text = f"waits for a node with {describe_needs(desired.needs)}"
    return f"{text} ({'; '.join(reasons)})" if reasons else f"{text} (there is no node)"


def describe_needs(needs: Needs) -> str:
    """Returns needs as text: `2 GPU, 1 CPU, zone=a`."""
    parts = [f"{amount:g} {name}" for name, amount in needs.amounts.items() if amount]
    parts += [f"{name}={value}" for name, value in needs.labels.items()]
    return ", ".join(parts) or "no resources"


def _order(desired: Desired, on_node: Sequence[Observed]) -> tuple[int, int]:
    of_role = sum(replica.role == desired.role and replica.is_live for replica in on_node)
    if desired.needs.pairs_by:
        # A partner that has none yet comes before an empty node.
        partners = sum(
            replica.needs.pairs_by == desired.needs.pairs_by and replica.is_live
            for replica in on_node
        )
        of_role -= partners - of_role
    return of_role, len(on_node)


def _find_obstacle(desired: Desired, node: Node, on_node: Sequence[Observed]) -> str:
    """Returns why a replica cannot run on a node; "" if it can."""
    if node.is_draining:
        return "is drained"
    for name, value in desired.needs.labels.items():
        if node.labels.get(name) != value:
            return f"{name} is {node.labels.get(name)!r}"
    of_group = [replica for replica in on_node if replica.group == desired.group]
    if desired.has_fixed_port and any(replica.member == desired.name for replica in of_group):
        return f"{desired.name} has a fixed port there"
    if desired.needs.per_node is not None and len(of_group) >= desired.needs.per_node:
        return f"has {len(of_group)} of {desired.group}, the most on one node"
    free = _free(node, on_node)
    for name, amount in desired.needs.amounts.items():
        if amount > free.get(name, 0.0) + EPSILON:
            return f"{free.get(name, 0.0):g} {name} free of {node.amounts.get(name, 0.0):g}"
    return ""


def _free(node: Node, on_node: Iterable[Observed]) -> Mapping[str, float]:
    free = dict(node.amounts)
    for replica in on_node:
        for name, amount in replica.needs.amounts.items():
            free[name] = free.get(name, 0.0) - amount
    return free
