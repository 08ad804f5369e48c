"""What a cluster needs next, from what is desired and what runs (pure).

Level-triggered: each step compares the present replicas with the desired members, so a controller
that starts again goes on where the one before ended. Only pauses after failures, and nodes that
were lost, are remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.service.restarts import RestartPolicy, Restarts
from meshctl.cluster.placement import choose_node
from meshctl.cluster.state import (
    Action,
    Desired,
    Forget,
    Needs,
    Node,
    Observed,
    Phase,
    Start,
    Stop,
)

_RESTARTS = RestartPolicy(initial_pause_s=1.0, max_pause_s=60.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of the reconciler, in seconds."""

    silent_s: float = 6.0
    """A replica whose supervisor does not respond for so long gets a successor, although its node
    still counts as alive. It is ended once the successor is routable, not before: its process may
    serve. Not while more than half of the nodes are silent, which an overload explains better."""
    pending_s: float = 120.0
    """A replica whose supervisor has not started within this time is placed again."""
    suspect_s: float = 60.0
    """Time in which a node that lost a replica is taken only if no other one fits."""
    drain_margin_s: float = 2.0
    """A replica on a node that is drained stops so long before it must."""
    restarts: RestartPolicy = _RESTARTS


@dataclass(slots=True)
class Plan:
    """The actions of a step. waiting: why members cannot be placed or replaced, by name. unplaced:
    what they need."""

    actions: list[Action] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    unplaced: list[Needs] = field(default_factory=list)


class Reconciler:
    """Decides the actions of a controller."""

    def __init__(self, policy: Policy = Policy()) -> None:  # frozen
        self._policy = policy
        self._restarts: dict[str, Restarts] = {}
        self._retry_at: dict[str, float] = {}
        self._suspects: dict[str, float] = {}
        self._numbers: dict[str, int] = {}

    def step(
        self,
        desired: Sequence[Desired],
        replicas: Iterable[Observed],
        nodes: Sequence[Node],
        now: float,
    ) -> Plan:
        """Returns what to do now.

        nodes: the live ones. now: seconds of a monotonic clock.
        """
        self._suspects = {node: until for node, until in self._suspects.items() if until > now}
        step = _Step(self, desired, {node.id: node for node in nodes}, now)
        for replica in sorted(replicas, key=lambda r: (r.member, r.number)):
            number = max(self._numbers.get(replica.member, 0), replica.number)
            self._numbers[replica.member] = number
            if reason := self._find_end(replica, step.nodes, now):
                step.plan.actions.append(Forget(replica, reason))
            else:
                step.present.append(replica)
                if replica.phase is Phase.ROUTABLE:
                    self._restarts_of(replica.member).ready(now)
                    self._retry_at.pop(replica.member, None)
        step.run()
        return step.plan

    def _find_end(self, replica: Observed, nodes: Mapping[str, Node], now: float) -> str:
        """Returns why a replica is not there any more; "" if it is. Remembers what that means for
        its node and for its member."""
        policy = self._policy
        if replica.phase is Phase.STOPPED:
            return "stopped"
        if replica.phase is Phase.FAILED:
            self._count_failure(replica.member, now)
            return f"failed: {replica.detail}"
        if replica.node_id not in nodes:
            return "its node is gone"
        limits = (
            (replica.is_dead, f"its supervisor has ended: {replica.detail}"),
            (replica.pending_s >= policy.pending_s, "its supervisor has not started"),
        )
        reason = next((text for is_over, text in limits if is_over), "")
        if reason:
            self.suspect(replica.node_id, now)
            if replica.is_dead and not replica.pid:
                # It never ran: the next one may end in the same way.
                self._count_failure(replica.member, now)
        return reason

    def _count_failure(self, member: str, now: float) -> None:
        self._retry_at[member] = now + self._restarts_of(member).ended(now)

    def _restarts_of(self, member: str) -> Restarts:
        return self._restarts.setdefault(member, Restarts(self._policy.restarts, None))

    def next_number(self, member: str) -> int:
        """Returns the number of the next replica of a member, and counts it."""
        number = self._numbers[member] = self._numbers.get(member, 0) + 1
        return number

    def retry_in(self, member: str, now: float) -> float:
        """Returns the seconds until a member may start again."""
        return max(0.0, self._retry_at.get(member, 0.0) - now)

    def suspect(self, node_id: str, now: float) -> None:
        """Remembers that a node has lost a replica."""
        self._suspects[node_id] = now + self._policy.suspect_s

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def suspects(self) -> Collection[str]:
        """The nodes that lost a replica."""
        return self._suspects.keys()


class _Step:
    """One step. present: the replicas that have not ended, with those that it starts."""

    def __init__(
        self,
        reconciler: Reconciler,
        desired: Sequence[Desired],
        nodes: Mapping[str, Node],
        now: float,
    ) -> None:
        self._reconciler = reconciler
        self._desired = desired
        self.nodes = nodes
        self._now = now
        self.present: list[Observed] = []
        self.plan = Plan()

    def run(self) -> None:
        self._stop_surplus()
        for desired in self._desired:
            live = self._live(desired.name)
            if not live:
                self._start(desired)
            else:
                self._keep(desired, live)
        self._replace_outdated()

    def _stop_surplus(self) -> None:
        names = {desired.name for desired in self._desired}
        surplus = [replica for replica in self.present if replica.member not in names]
        if not names and surplus:
            # The whole mesh ends: what sends work before what receives it.
            first = min(replica.rank for replica in surplus)
            surplus = [replica for replica in surplus if replica.rank == first]
        for replica in surplus:
            if replica.is_live:
                self._stop(replica, "not desired any more")

    def _keep(self, desired: Desired, live: Sequence[Observed]) -> None:
        newest, silent_s = live[-1], self._reconciler.policy.silent_s
        if newest.phase is Phase.ROUTABLE and not newest.is_unreachable:
            for older in live[:-1]:
                if older.silent_s >= silent_s:
                    self._reconciler.suspect(older.node_id, self._now)
                    self.plan.actions.append(Forget(older, "its supervisor does not respond"))
                    self.present.remove(older)
                else:
                    self._stop(older, f"{newest.id} is routable")
            live = live[-1:]
        if newest.silent_s >= silent_s and not self._are_most_silent():
            self._start(desired)
            return
        for replica in live:
            node = self.nodes[replica.node_id]
            if not node.is_draining:
                continue
            if replica is newest:
                # Its successor is routable before it ends, if there is time.
                self._start(desired)
            ends_at = node.drained_at
            limit_s = replica.stop_s + self._reconciler.policy.drain_margin_s
            if ends_at is not None and self._now >= ends_at - limit_s:
                self._stop(replica, "its node is drained")

    def _are_most_silent(self) -> bool:
        silent = {replica.node_id for replica in self.present if replica.silent_s > 0}
        return len(silent) * 2 > len(self.nodes)

    def _replace_outdated(self) -> None:
        """Replaces members whose settings have changed, one at a time; those that serve nothing at
        once."""
        outdated: list[tuple[Desired, Observed]] = []
        unsettled: list[str] = []
        for desired in self._desired:
            replicas = [replica for replica in self.present if replica.member == desired.name]
            live = [replica for replica in replicas if replica.is_live]
            if live and live[-1].digest != desired.digest and not self._is_serving(live[-1]):
                self._stop(live[-1], "its settings have changed")
                unsettled.append(desired.name)
            elif len(replicas) != 1 or not self._is_serving(replicas[0]):
                unsettled.append(desired.name)
            elif replicas[0].digest != desired.digest:
                outdated.append((desired, replicas[0]))
        if not outdated:
            if not unsettled:
                self._spread()
            return
        desired, replica = min(outdated, key=lambda pair: (-pair[0].rank, pair[0].name))
        if unsettled:
            self.plan.waiting[desired.name] = f"is replaced after {', '.join(unsettled[:3])}"
            return
        self._replace(desired, replica)

    def _spread(self) -> None:
        """Moves a member of a role of which all members are on one node, as after the loss of the
        other nodes: another node would otherwise take nothing when it comes back."""
        for desired in reversed(self._desired):
            of_role = [r for r in self.present if r.role == desired.role]
            occupied = {replica.node_id for replica in of_role}
            if len(of_role) < 2 or len(occupied) > 1 or self._has_partners(desired):
                continue
            others = [node for node in self.nodes.values() if node.id not in occupied]
            node = choose_node(desired, others, self.present, self._reconciler.suspects)
            if isinstance(node, Node) and node.id not in self._reconciler.suspects:
                self._start_on(desired, node)
                return

    def _has_partners(self, desired: Desired) -> bool:
        """Returns whether members of another role are its partners, so that a member that moves
        loses them."""
        pairs_by = desired.needs.pairs_by
        return pairs_by != "" and any(
            other.needs.pairs_by == pairs_by and other.role != desired.role
            for other in self.present
        )

    def _replace(self, desired: Desired, replica: Observed) -> None:
        has_peers = any(
            other.role == desired.role and other.member != desired.name and self._is_serving(other)
            for other in self.present
        )
        if has_peers and not desired.is_surge:
            self._stop(replica, "its settings have changed")
        elif (
            not self._start(desired)
            and has_peers
            and not self._reconciler.retry_in(desired.name, self._now)
        ):
            # No node has room for both.
            self._stop(replica, "its settings have changed")

    def _is_serving(self, replica: Observed) -> bool:
        is_routable = replica.phase is Phase.ROUTABLE and not replica.is_unreachable
        return is_routable and not self.nodes[replica.node_id].is_draining

    def _start(self, desired: Desired) -> bool:
        """Starts a replica if a node fits and no pause after a failure is over."""
        reconciler = self._reconciler
        if pause_s := reconciler.retry_in(desired.name, self._now):
            self.plan.waiting[desired.name] = f"failed; starts again in {pause_s:.0f} s"
            return False
        unreachable = {r.node_id for r in self.present if r.is_unreachable}
        node = choose_node(
            desired, self.nodes.values(), self.present, {*reconciler.suspects, *unreachable}
        )
        if isinstance(node, str):
            self.plan.waiting[desired.name] = node
            self.plan.unplaced.append(desired.needs)
            return False
        self._start_on(desired, node)
        return True

    def _start_on(self, desired: Desired, node: Node) -> None:
        start = Start(desired, node, self._reconciler.next_number(desired.name))
        self.plan.actions.append(start)
        self.present.append(observed_start(start))

    def _stop(self, replica: Observed, reason: str) -> None:
        stops = (action.replica.id for action in self.plan.actions if isinstance(action, Stop))
        if replica.id not in stops:
            self.plan.actions.append(Stop(replica, reason))

    def _live(self, member: str) -> list[Observed]:
        return [r for r in self.present if r.member == member and r.is_live]


def replica_id(member: str, number: int) -> str:
    """Returns the name of a replica."""
    return f"{member}.{number}"


def observed_start(start: Start) -> Observed:
    """Returns a replica that has just been started."""
    desired = start.desired
    return Observed(
        id=replica_id(desired.name, start.number),
        member=desired.name,
        number=start.number,
        group=desired.group,
        role=desired.role,
        rank=desired.rank,
        stop_s=desired.stop_s,
        digest=desired.digest,
        node_id=start.node.id,
        needs=desired.needs,
    )
