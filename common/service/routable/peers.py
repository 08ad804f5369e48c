"""The peers that a member waits for (pure).

A member waits for an acknowledgement of each live peer that sends it work, and for each peer that
it needs itself (`waits_for`, by the state of the member). A peer that has not responded for the
limit is given up: the member does not wait for it, and still names it. Without a limit, a member
waits until the registry shows it, and a live member of each required role. While the registry has
entries of other meshes, or of this one if the member has another mesh token or none, it also waits
for a member of its own mesh that sends it work, or of another service.

Invariants: a peer is waited for, given up or acknowledged; an acknowledged peer stays so; peers
that have left are none of them; a member that is routable stays so, and takes no new peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from common.instance_ids import MEMBER_IDS
from common.registry.instances import Instance, Service, Snapshot, role_of

# The services that send work to a member, by its own.
SENDERS: Final[Mapping[Service, tuple[Service, ...]]] = {
    "frontend": (),
    "router": ("frontend",),
    "indexer": ("router",),
    "worker": ("frontend", "router"),
    "batch": (),
}
_NO_RESPONSE = "it has not responded yet"
# Without the first, peers that join now would not be waited for.
_NOT_SHOWN = "the registry does not show it yet"
_NO_MEMBER = "no live member has this role, which --required-roles names"
_OTHER_TOKEN = (
    "no other member proves its mesh token (--mesh-token),"
    " and the registry has entries without a proof"
)
_NO_TOKEN = "it has no mesh token (--mesh-token) and no certificates, and the other members do"


@dataclass(frozen=True, slots=True)
class WaitingPeer:
    """A peer that has not acknowledged a member, or a required role without a live member."""

    instance_id: int
    """0: of a role."""

    stable_name: str
    """"": it has none."""

    service: str
    """Or the role."""

    reason: str
    """Why it has not acknowledged."""

    def __str__(self) -> str:
        name = self.stable_name or str(self.instance_id or "")
        return f"{f'{self.service} {name}'.rstrip()}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Routable:
    """Whether the peers of a member send it work."""

    is_routable: bool
    is_leaving: bool = False
    """Whether the member is not registered any more."""

    missing: tuple[WaitingPeer, ...] = ()
    """Peers that it waits for; while it leaves, those that still send work."""

    given_up: tuple[WaitingPeer, ...] = ()
    """Peers that it does not wait for any more: they do not respond."""


@dataclass(slots=True)
class _Peer:
    instance: Instance
    responded_at: float
    """Time of the last response; at first, when the wait began."""

    reason: str = _NO_RESPONSE
    is_given_up: bool = False

    def describe(self) -> WaitingPeer:
        instance = self.instance
        return WaitingPeer(instance.id, instance.stable_name, instance.service, self.reason)


class Peers:
    """The peers of one member while it joins, or while it leaves. All times are seconds."""

    def __init__(
        self,
        member: Instance,
        limit_s: float,
        *,
        is_leaving: bool,
        required: Sequence[str] = (),
    ) -> None:
        """Begins without peers.

        member: the instance that waits.
        limit_s: silence after which a peer is given up.
        required: roles of which a member must be live (see `role_of`).
        """
        self.is_leaving = is_leaving
        self.is_done = False
        self._member = member
        self._limit_s = limit_s
        self._waiting: dict[int, _Peer] = {}
        self._acknowledged: set[int] = set()
        self._required = required
        # What is missing without being a peer; the member itself while the registry does not show
        # it.
        self._absent: tuple[WaitingPeer, ...] = ()
        self.not_of_mesh = ""
        """Why the member may be of another mesh than the registry's members; "": it is not."""

    def follow(
        self, snapshot: Snapshot, waits_for: Callable[[Instance], bool], now: float
    ) -> tuple[Instance, ...]:
        """Takes the live members. Returns the senders of which it begins to wait.

        waits_for: whether the member itself needs an instance that does not send it work.
        """
        present = snapshot.instances
        for peer_id in self._waiting.keys() - present.keys():
            del self._waiting[peer_id]
        self._acknowledged &= present.keys()
        if self.is_done:
            return ()
        self.not_of_mesh = "" if self.is_leaving else self._find_other_mesh(snapshot)
        self._absent = () if self.is_leaving else tuple(self._find_absent(snapshot))
        senders = SENDERS[self._member.service]
        new_senders = []
        for instance in present.values():
            if instance.id in self._waiting or instance.id in self._acknowledged:
                continue
            if instance.service in senders:
                new_senders.append(instance)
            elif self.is_leaving or not waits_for(instance):
                continue
            self._waiting[instance.id] = _Peer(instance, now)
        self._update()
        return tuple(new_senders)

    def responded(self, peer_id: int, reason: str, now: float) -> None:
        """Records a response. reason: why the peer does not acknowledge; "": it does."""
        if (peer := self._waiting.get(peer_id)) is None:
            return
        if reason:
            peer.reason, peer.responded_at, peer.is_given_up = reason, now, self.is_done
        else:
            del self._waiting[peer_id]
            self._acknowledged.add(peer_id)
        self._update()

    def failed(self, peer_id: int, reason: str, now: float) -> bool:
        """Records that a peer has not responded. Returns whether it is given up by that."""
        if (peer := self._waiting.get(peer_id)) is None:
            return False
        peer.reason = reason
        was_given_up = peer.is_given_up
        peer.is_given_up = self.is_done or self._left_s(peer, now) <= 0
        self._update()
        return peer.is_given_up and not was_given_up

    def remaining_s(self, peer_id: int, now: float) -> float:
        """Returns the seconds until a silent peer is given up; 0 if it is already."""
        peer = self._waiting.get(peer_id)
        return 0.0 if peer is None else max(0.0, self._left_s(peer, now))

    def is_waiting(self, peer_id: int) -> bool:
        """Returns whether a peer has not acknowledged, given up or not."""
        return peer_id in self._waiting

    @property
    def own_needs(self) -> tuple[Instance, ...]:
        """Peers that the member needs itself and that have not acknowledged."""
        senders = SENDERS[self._member.service]
        found = (peer.instance for peer in self._waiting.values())
        return tuple(instance for instance in found if instance.service not in senders)

    @property
    def is_complete(self) -> bool:
        """Whether the member is done and has no peer that is given up."""
        return self.is_done and not self._waiting

    @property
    def state(self) -> Routable:
        peers = self._waiting.values()
        return Routable(
            is_routable=self.is_done and not self.is_leaving,
            is_leaving=self.is_leaving,
            missing=(
                *self._absent,
                *(peer.describe() for peer in peers if not peer.is_given_up),
            ),
            given_up=tuple(peer.describe() for peer in peers if peer.is_given_up),
        )

    def _find_absent(self, snapshot: Snapshot) -> Iterator[WaitingPeer]:
        member, present = self._member, snapshot.instances.values()
        if all(instance.id != member.id for instance in present):
            yield WaitingPeer(member.id, member.stable_name, member.service, _NOT_SHOWN)
        if self.not_of_mesh:
            yield WaitingPeer(member.id, member.stable_name, member.service, self.not_of_mesh)
        roles = {role_of(instance) for instance in present}
        for role in self._required:
            if role not in roles:
                yield WaitingPeer(0, "", role, _NO_MEMBER)

    def _find_other_mesh(self, snapshot: Snapshot) -> str:
        """Returns why the member may be of another mesh, "" if it is not. The registry has entries
        that it cannot check, or members with keys while it has none; and none of its own mesh sends
        it work, or is of another service."""
        member, present = self._member, snapshot.instances.values()
        has_key = member.id in MEMBER_IDS
        own = [one for one in present if has_key or one.id not in MEMBER_IDS]
        others = {instance.service for instance in own} - {member.service}
        senders = SENDERS[member.service]
        if others.intersection(senders) if senders else others:
            return ""
        if len(own) < len(present):
            return _NO_TOKEN
        return _OTHER_TOKEN if snapshot.has_unauthenticated else ""

    def _left_s(self, peer: _Peer, now: float) -> float:
        return peer.responded_at + self._limit_s - now

    def _update(self) -> None:
        if not self._absent and all(peer.is_given_up for peer in self._waiting.values()):
            self.is_done = True
