"""The members of the mesh with what they responded (pure)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from common.inspection.members import MemberState
from common.registry.instances import BUILD_META_KEY, HTTP_META_KEY, Instance, SnapshotDiff
from console_svc.collect.history import History
from console_svc.state.members import SERVING, UNKNOWN, Curve, Event, Member, Rank

MEMBER_CURVES: Final = ("running", "waiting", "kv_use")
MEMBER_POINTS: Final = 60
EVENTS_MAX: Final = 500
# More members are not shown.
MEMBERS_MAX: Final = 10_000

_SERVICES: Final = ("frontend", "router", "indexer", "batch", "worker")
_ROLES: Final = ("aggregated", "prefill", "decode")


@dataclass(slots=True)
class _Entry:
    """A member. asked_at: monotonic seconds of the last query, also of one that runs; 0: none."""

    instance: Instance
    member: Member
    order: tuple[object, ...]
    asked_at: float = 0.0
    history: History = field(default_factory=lambda: History(MEMBER_CURVES, MEMBER_POINTS))


class Roster:
    """All members by id."""

    def __init__(self, domain_taint: str) -> None:
        """domain_taint: the first part of the taint that names the transfer domain of a worker, as
        the routers use it; "": there are no domains."""
        self._domain_taint = domain_taint
        self._entries: dict[int, _Entry] = {}
        self._sorted: tuple[Member, ...] | None = ()
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.unshown = 0
        """Members above MEMBERS_MAX."""

    def apply(self, changes: SnapshotDiff, now_s: float) -> None:
        """Applies a difference of the registry. now_s: Unix seconds."""
        for instance in changes.left:
            entry = self._entries.pop(instance.id, None)
            if entry is not None:
                self._add_event(now_s, "left", entry.member, "left the mesh")
            else:
                self.unshown = max(0, self.unshown - 1)
        for instance in changes.joined:
            if len(self._entries) >= MEMBERS_MAX:
                self.unshown += 1
                continue
            member = replace(self._describe(instance), seen_s=now_s)
            self._entries[instance.id] = _Entry(instance, member, _sort_key(instance))
            self._add_event(now_s, "joined", member, f"joined at {instance.address}")
        for instance in changes.changed:
            entry = self._entries.get(instance.id)
            if entry is None:
                continue
            text = _describe_change(entry.instance, instance)
            entry.instance = instance
            entry.member = _with_responses(self._describe(instance), entry.member)
            if text:
                self._add_event(now_s, "changed", entry.member, text)
        self._sorted = None

    def next_to_ask(self, count: int, now: float, interval_s: float) -> list[Instance]:
        """Returns up to `count` members, the one asked longest ago first, which are marked as
        asked. Members are asked at most once an interval. now: monotonic seconds."""
        due = [e for e in self._entries.values() if now - e.asked_at >= interval_s]
        due.sort(key=lambda entry: entry.asked_at)
        for entry in due[:count]:
            entry.asked_at = now
        return [entry.instance for entry in due[:count]]

    def needs_routable(self, instance_id: int) -> bool:
        """Returns whether a member may still become routable; then it stays so."""
        entry = self._entries.get(instance_id)
        return entry is not None and entry.member.is_routable is not True

    def responded(self, instance_id: int, state: MemberState, now_s: float) -> None:
        """Keeps the response of a member. now_s: Unix seconds."""
        entry = self._entries.get(instance_id)
        if entry is None:
            return
        before, member = entry.member, _updated(entry.member, state, now_s)
        entry.member = member
        self._sorted = None
        if member.service == "worker":
            values = {"running": member.running, "waiting": member.waiting}
            entry.history.add(now_s, {**values, "kv_use": member.kv_use})
        if before.health not in (member.health, UNKNOWN):
            reason = f": {member.failure}" if member.failure else ""
            text = f"is {member.health.replace('_', ' ')}{reason} (was {before.health})"
            self._add_event(now_s, "health", member, text)

    def set_traffic(
        self,
        instance_id: int,
        running: int | None,
        waiting: int | None,
        requests_per_s: float | None,
        tokens_per_s: float | None,
    ) -> None:
        """Keeps the figures of a frontend's metrics; None: unknown."""
        entry = self._entries.get(instance_id)
        if entry is not None:
            entry.member = replace(
                entry.member,
                running=running,
                waiting=waiting,
                requests_per_s=requests_per_s,
                tokens_per_s=tokens_per_s,
            )
            self._sorted = None

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of display."""
        if self._sorted is None:
            entries = sorted(self._entries.values(), key=lambda entry: entry.order)
            self._sorted = tuple(entry.member for entry in entries)
        return self._sorted

    def instances(self, service: str) -> list[Instance]:
        return [e.instance for e in self._entries.values() if e.instance.service == service]

    def name(self, instance_id: int) -> str:
        """Returns the name of a member; its id if it has left."""
        entry = self._entries.get(instance_id)
        return str(instance_id) if entry is None else entry.member.name

    def curves(self, member_id: str) -> dict[str, Curve]:
        entry = self._entries.get(int(member_id)) if member_id.isdecimal() else None
        if entry is None:
            return {name: Curve() for name in MEMBER_CURVES}
        return entry.history.curves()

    def _describe(self, instance: Instance) -> Member:
        is_worker = instance.service == "worker"
        url = instance.meta.get(HTTP_META_KEY, "")
        if not url and instance.http_address:
            url = f"http://{instance.http_address}"
        return Member(
            id=str(instance.id),
            service=instance.service,
            name=instance.stable_name or str(instance.id),
            address=instance.address,
            url=url,
            model=instance.model,
            role=instance.role if is_worker else "",
            version=instance.meta.get(BUILD_META_KEY, ""),
            transfer_group=instance.transfer_group,
            domain=self._domain(instance.taints),
            taints=tuple(sorted(instance.taints)),
            adapters=tuple(sorted(instance.loras)),
            kv_index=instance.kv_index,
            dp_size=instance.dp_size,
            block_size=instance.block_size,
            context_length=instance.context_length,
        )

    def _domain(self, taints: Iterable[str]) -> str:
        prefix = f"{self._domain_taint}="
        found = (t.removeprefix(prefix) for t in taints if t.startswith(prefix))
        return min(found, default="") if self._domain_taint else ""

    def _add_event(self, at_s: float, kind: str, member: Member, text: str) -> None:
        event = Event(at_s, kind, member.id, member.name, member.service, text)
        self.events.appendleft(event)


def _updated(member: Member, state: MemberState, now_s: float) -> Member:
    routable = state.routable
    ranks = tuple(
        Rank(
            dp_rank=load.dp_rank,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            kv_used_blocks=load.kv_used_blocks,
            kv_total_blocks=load.kv_total_blocks if load.HasField("kv_total_blocks") else None,
            rooms_open=load.rooms_open,
        )
        for load in state.loads
    )
    member = replace(member, health=state.health, failure=state.failure, asked_s=now_s)
    if routable is not None:
        missing = tuple(map(str, (*routable.missing, *routable.given_up)))
        member = replace(member, is_routable=routable.is_routable, missing=missing)
    if member.service != "worker":
        return member
    return replace(
        member,
        ranks=ranks,
        running=sum(rank.running for rank in ranks) if ranks else None,
        waiting=sum(rank.waiting for rank in ranks) if ranks else None,
    )


def _with_responses(new: Member, old: Member) -> Member:
    """Returns a member as it is advertised now, with the responses that it had."""
    return replace(
        new,
        health=old.health,
        failure=old.failure,
        is_routable=old.is_routable,
        missing=old.missing,
        ranks=old.ranks,
        running=old.running,
        waiting=old.waiting,
        requests_per_s=old.requests_per_s,
        tokens_per_s=old.tokens_per_s,
        seen_s=old.seen_s,
        asked_s=old.asked_s,
    )


def _describe_change(old: Instance, new: Instance) -> str:
    """Returns what an operator would notice; "" for other changes."""
    texts = []
    if added := sorted(new.loras - old.loras):
        texts.append(f"loaded the adapter {', '.join(added)}")
    if removed := sorted(old.loras - new.loras):
        texts.append(f"unloaded the adapter {', '.join(removed)}")
    if old.taints != new.taints:
        texts.append(f"has the taints {', '.join(sorted(new.taints)) or 'none'}")
    if old.kv_index != new.kv_index:
        texts.append(f"has the KV index {new.kv_index}")
    return "; ".join(texts)


def _sort_key(instance: Instance) -> tuple[object, ...]:
    parts = re.split(r"([0-9]+)", instance.stable_name)
    natural = tuple(int(part) if n % 2 else part for n, part in enumerate(parts))
    return _SERVICES.index(instance.service), _ROLES.index(instance.role), natural, instance.id


def count_unhealthy(members: Sequence[Member]) -> int:
    """Returns the members that were asked and do not serve."""
    return sum(member.health not in (SERVING, UNKNOWN) for member in members)
