"""Waits until the peers of this process send it work, and when it leaves, until they do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from random import Random

import structlog

from common.errors import MeshError
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.registry.registry import Registry, follow
from common.rpc import channel as rpc
from common.runtime.tasks import TaskGroup
from common.service.lifecycle import Lifecycle
from common.service.routable.peers import Peers, Routable
from common.service.routable.service import read_reason
from common.streams.backoff import Backoff
from common.streams.silence import ACKNOWLEDGE

LOG = structlog.get_logger(__name__)

# Limits of one call. A live peer responds within its heartbeat.
CALL_TIMEOUT_S, CALL_TIMEOUT_MIN_S = 2.0, 1.0
# Pause after a call that failed before the heartbeat of its peer, at first and at most.
PAUSE_S, PAUSE_MAX_S = 0.1, 1.0
# Longest pause after a refusal, also as a share of the limit of silence. A peer keeps the nonce of
# each call for minutes, and many members may wait for it.
REFUSED_PAUSE_MAX_S, REFUSED_PAUSE_SHARE = 2.5, 0.25
# Interval of looks at what this process needs itself: at first, and at most.
OWN_NEEDS_S, OWN_NEEDS_MAX_S = 0.02, 0.2

# Returns why this process needs a peer and does not have it yet; "" if it does not need it.
OwnNeed = Callable[[Instance], str]
# Returns whether this process is about to have what it needs of a peer.
IsInProgress = Callable[[Instance], bool]


class RoutableWatch:
    """Whether one process is routable, and the tasks that find out.

    Use: `join` after each registration, `leave` before each deregistration, `left` after it.
    """

    def __init__(
        self,
        registry: Registry,
        security: rpc.Security,
        own_need: OwnNeed,
        is_in_progress: IsInProgress,
        lifecycle: Lifecycle,
        *,
        limit_s: float,
        required: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins as not routable.

        own_need: of this process.
        is_in_progress: of its own needs; counts as a response.
        lifecycle: owns the tasks; its health is SERVING when the process is routable.
        limit_s: silence after which a peer is given up.
        required: see `Peers`.
        """
        self._required = required
        self._registry = registry
        self._security = security
        self._own_need = own_need
        self._is_in_progress = is_in_progress
        self._lifecycle = lifecycle
        self._limit_s = limit_s
        self._clock = clock
        self._rng = Random()
        self._member: Instance | None = None
        self._joined_at = 0.0
        self._peers: Peers | None = None
        self._changed = asyncio.Event()
        self._is_announced = False
        # The reason that was logged last.
        self._not_of_mesh = ""
        self._task: asyncio.Task[None] | None = None
        lifecycle.health.await_routable()

    @property
    def state(self) -> Routable:
        return Routable(False) if self._peers is None else self._peers.state

    async def join(self, member: Instance) -> None:
        """Begins to wait for the peers of this process, which is registered; it is routable at
        once if there are none."""
        self._member, self._joined_at = member, self._clock()
        peers = Peers(member, self._limit_s, is_leaving=False, required=self._required)
        self._peers = peers
        snapshot = await self._registry.snapshot(member.namespace)
        senders: tuple[Instance, ...] = ()
        if snapshot.revision:
            senders = self._follow(peers, snapshot)
            await self._announce(peers)
        if not peers.is_complete:
            # Without the request id and the deadline of a call that makes the process join again.
            work = self._run(peers, senders)
            self._task = Context().run(
                lambda: self._lifecycle.spawn(work, name="routable", essential=False)
            )

    async def leave(self) -> None:
        """Ends the wait for peers: the process is not routable any more. Idempotent."""
        if self._member is None or (self._peers is not None and self._peers.is_leaving):
            return
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._peers = Peers(self._member, self._limit_s, is_leaving=True)
        self._is_announced = False
        await self._lifecycle.health.set_routable(False)

    async def left(self, timeout_s: float) -> None:
        """Returns when no live peer sends work to this process any more, after `timeout_s` or the
        limit of silence at most."""
        if self._member is None or self._peers is None or not self._peers.is_leaving:
            return
        # New ones: an earlier call may have ended before its peers had acknowledged.
        peers = self._peers = Peers(self._member, self._limit_s, is_leaving=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, self._limit_s)):
                await self._run(peers)
        if late := (*peers.state.missing, *peers.state.given_up):
            LOG.warning("left_with_peers", peers=list(map(str, late)))

    async def _run(self, peers: Peers, senders: Sequence[Instance] = ()) -> None:
        """Waits until all peers have acknowledged; a process that leaves waits for none that is
        given up. senders: those that `peers` has taken before."""
        assert self._member is not None, "after `join`"
        namespace = self._member.namespace
        async with TaskGroup() as group:
            tasks = [group.create_task(self._check_own_needs(peers))]

            def begin(peer: Instance) -> None:
                tasks.append(group.create_task(self._call(peers, peer)))

            def take(snapshot: Snapshot, _: SnapshotDiff) -> None:
                for peer in self._follow(peers, snapshot):
                    begin(peer)
                self._changed.set()

            for peer in senders:
                begin(peer)
            tasks.append(group.create_task(follow(self._registry, namespace, take)))
            while not (peers.is_complete or (peers.is_leaving and peers.is_done)):
                await self._changed.wait()
                self._changed.clear()
                await self._announce(peers)
            for task in tasks:
                task.cancel()

    def _follow(self, peers: Peers, snapshot: Snapshot) -> tuple[Instance, ...]:
        """Gives the peers the live members; returns the new senders. Logs once if this process is
        of another mesh: it would wait for ever."""
        senders = peers.follow(snapshot, self._is_needed, self._clock())
        if peers.not_of_mesh and peers.not_of_mesh != self._not_of_mesh:
            LOG.warning("not_of_mesh", reason=peers.not_of_mesh)
        self._not_of_mesh = peers.not_of_mesh
        return senders

    async def _call(self, peers: Peers, peer: Instance) -> None:
        """Calls a peer until it acknowledges this process or has left."""
        assert self._member is not None, "after `join`"
        failures = Backoff(PAUSE_S, PAUSE_MAX_S, self._rng)
        longest_s = max(PAUSE_S, min(self._limit_s * REFUSED_PAUSE_SHARE, REFUSED_PAUSE_MAX_S))
        refusals = Backoff(PAUSE_S, longest_s, self._rng, jitter=(0.5, 1.0))
        async with rpc.channel(peer.address, role=peer.service, security=self._security) as channel:
            while peers.is_waiting(peer.id):
                called_at = self._clock()
                left_s = max(CALL_TIMEOUT_MIN_S, peers.remaining_s(peer.id, called_at))
                try:
                    reason = await read_reason(
                        channel,
                        self._member.id,
                        is_leaving=peers.is_leaving,
                        timeout_s=min(CALL_TIMEOUT_S, left_s),
                    )
                except MeshError as error:
                    self._record_failure(peers, peer, f"the call failed: {error.message}")
                    if self._clock() - called_at < ACKNOWLEDGE.heartbeat_s / 2:
                        pause_s = failures.next_s()
                    else:
                        pause_s = 0.0
                        failures.reset()
                else:
                    peers.responded(peer.id, reason, self._clock())
                    pause_s = refusals.next_s()
                    failures.reset()
                self._changed.set()
                if peers.is_waiting(peer.id):
                    await asyncio.sleep(pause_s)

    def _record_failure(self, peers: Peers, peer: Instance, reason: str) -> None:
        if peers.failed(peer.id, reason, self._clock()):
            LOG.warning(
                "peer_given_up",
                peer_id=peer.id,
                peer_service=peer.service,
                stable_name=peer.stable_name,
                reason=reason,
                limit_s=self._limit_s,
            )

    async def _check_own_needs(self, peers: Peers) -> None:
        """Looks at what this process needs itself. Ends with the wait."""
        pause = Backoff(OWN_NEEDS_S, OWN_NEEDS_MAX_S, None)
        while True:
            for peer in peers.own_needs:
                reason = self._own_need(peer)
                if reason and not self._is_in_progress(peer):
                    self._record_failure(peers, peer, reason)
                else:
                    peers.responded(peer.id, reason, self._clock())
                self._changed.set()
            await asyncio.sleep(pause.next_s())

    def _is_needed(self, instance: Instance) -> bool:
        return bool(self._own_need(instance))

    async def _announce(self, peers: Peers) -> None:
        """Reports once that this process is routable."""
        if not peers.state.is_routable or self._is_announced:
            return
        self._is_announced = True
        await self._lifecycle.health.set_routable(True)
        elapsed_s = round(self._clock() - self._joined_at, 3)
        LOG.info("routable", s=elapsed_s, given_up=list(map(str, peers.state.given_up)))
