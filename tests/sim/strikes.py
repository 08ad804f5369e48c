"""Injection of each kind of fault: a method of `FaultInjector` has the name of the kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from common.errors import Unavailable, WorkerLost
from common.registry.instances import Role
from tests.sim.faults import KEEPALIVE_S, ROUTER_SAFE_FAULTS, Fault, FaultKind, select_by_draw
from tests.sim.fleet import (
    MODEL,
    NAMESPACE,
    NOTICE_S,
    Peer,
    SimFrontend,
    SimIndexer,
    SimRouter,
    SimWorker,
)
from tests.sim.net import StreamEnd, ends_between
from tests.sim.wire import kv_address

if TYPE_CHECKING:
    from tests.sim.world import World

# A fault during a handoff waits this long for one.
HANDOFF_WAIT_S = 2.0
POLL_S = 0.005
# Longest delay of messages while links are slow, in seconds; below what makes a worker lost.
SLOW_MAX_S = 0.6
# Longest time of a router for a message of its indexer while it reads slowly; below what makes an
# indexer silent.
READ_DELAY_MAX_S = 4.0
# Workers without faults if the first worker (of each role) is protected.
PROTECTED_WORKERS = frozenset({"w0", "p0", "d0"})
# For a process that ends: its peers notice at once.
_IMMEDIATE = Fault(
    0.0, FaultKind.WORKER_DRAIN, 0.0, 0.0, duration_s=0.0, near_s=0.0, far_s=0.0, notice_s=0.0
)


class FaultInjector:
    """Injects the faults of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()

    async def inject(self, fault: Fault) -> None:
        """Waits for the time of a fault and injects it."""
        await asyncio.sleep(fault.at)
        inject: Callable[[Fault], Coroutine[None, None, None]] = getattr(self, fault.kind.value)
        await inject(fault)

    def _select_worker(self, fault: Fault) -> SimWorker | None:
        eligible = self._eligible_workers()
        return select_by_draw(eligible, fault.target_draw) if eligible else None

    def _eligible_workers(self, role: Role | None = None) -> list[SimWorker]:
        protected = PROTECTED_WORKERS if self._world.scenario.protect_first else ()
        return [
            worker
            for worker in self._world.workers
            if worker.is_serving and worker.stable_name not in protected and worker.model == MODEL
            if role in (None, worker.role)
        ]

    async def _worker_in_handoff(self, fault: Fault, role: Role) -> SimWorker | None:
        """A worker of a role, with an open room if there is one within HANDOFF_WAIT_S."""
        for _ in range(round(HANDOFF_WAIT_S / POLL_S)):
            eligible = [w for w in self._eligible_workers(role) if w.engine.loads()[0].rooms_open]
            if eligible:
                return select_by_draw(eligible, fault.target_draw)
            await asyncio.sleep(POLL_S)
        eligible = self._eligible_workers(role)
        return select_by_draw(eligible, fault.target_draw) if eligible else None

    def _select_frontend(self, fault: Fault) -> SimFrontend | None:
        eligible = [f for f in self._world.frontends if f.is_serving]
        return select_by_draw(eligible, fault.second_draw) if eligible else None

    def _select_router(self, fault: Fault) -> SimRouter | None:
        eligible = [r for r in self._world.routers if r.process.is_alive and r.lease is not None]
        return select_by_draw(eligible, fault.target_draw) if eligible else None

    def _record(self, fault: Fault, *facts: object) -> None:
        self._world.trace.note("fault", fault.kind.value, *facts)
        self._world.injected[fault.kind.value] += 1
        self._world.sessions.is_undisturbed &= fault.kind in ROUTER_SAFE_FAULTS

    def _cut(self, near: StreamEnd, fault: Fault) -> None:
        """Breaks a stream; each side notices it in its own time."""
        far = near.peer
        assert far is not None, "a stream has two ends"
        near.sever()
        error = Unavailable("the connection broke")
        self._loop.call_later(fault.near_s, near.cut, error)
        self._loop.call_later(fault.far_s, far.cut, error)

    async def _hold(self, ends: Sequence[StreamEnd], fault: Fault) -> None:
        held = [end for end in ends if end.peer is not None]
        for end in held:
            end.hold()
        await asyncio.sleep(fault.duration_s)
        for end in held:
            end.release()

    async def _crash(self, peer: Peer, fault: Fault) -> None:
        """Ends a process abruptly."""
        for end in tuple(peer.process.ends):
            other = end.peer
            end.sever()
            if other is not None:
                self._loop.call_later(fault.near_s, other.cut, Unavailable("connection reset"))
        if isinstance(peer, SimFrontend):
            peer.crash()
        else:
            peer.process.kill()
        if isinstance(peer, SimRouter):
            self._world.counts["queued at a router death"] += len(peer.router.queue)
            self._world.checks.record_fault(None, fault.duration_s + fault.notice_s)
        members = self._world.store.members(NAMESPACE)
        self._loop.call_later(fault.notice_s, members.remove, peer.id)
        if isinstance(peer, SimWorker):
            self._world.net.close(peer.address, peer.process)
            peer.gone_at = peer.gone_at or self._loop.time() + fault.notice_s
            peer.left_at = peer.left_at or peer.gone_at
            await peer.engine.cleanup()

    async def attach_cut(self, fault: Fault) -> None:
        """A token stream breaks."""
        ends = self._attach_ends(fault)
        if ends:
            self._cut(ends[0], fault)

    async def attach_hold(self, fault: Fault) -> None:
        """A token stream stalls in one or both directions, then continues."""
        ends = self._attach_ends(fault)
        far = [end.peer for end in ends if end.peer is not None]
        await self._hold([*ends, *far] if fault.near_s < 1 else ends or far, fault)

    def _attach_ends(self, fault: Fault) -> list[StreamEnd]:
        """The frontend's end of one stream, if there is one between these two."""
        worker, frontend = self._select_worker(fault), self._select_frontend(fault)
        if worker is None or frontend is None:
            return []
        self._record(fault, frontend.stable_name, worker.stable_name)
        self._world.checks.record_fault(worker, fault.duration_s + KEEPALIVE_S)
        return ends_between(frontend.process, worker.process)[:1]

    async def session_cut(self, fault: Fault) -> None:
        """The link between a frontend and its router breaks."""
        for end in self._session_ends(fault):
            self._cut(end, fault)

    async def session_hold(self, fault: Fault) -> None:
        """The link between a frontend and its router stalls."""
        await self._hold(self._session_ends(fault), fault)

    def _session_ends(self, fault: Fault) -> list[StreamEnd]:
        frontend = self._select_frontend(fault)
        if frontend is None:
            return []
        self._record(fault, frontend.stable_name)
        self._world.checks.record_fault(None, fault.duration_s + KEEPALIVE_S)
        routers = [router.process for router in self._world.routers]
        return [end for router in routers for end in ends_between(frontend.process, router)]

    async def worker_kill(self, fault: Fault) -> None:
        """A worker dies, and a successor replaces it."""
        await self._kill_and_replace(self._select_worker(fault), fault)

    async def _kill_and_replace(self, worker: SimWorker | None, fault: Fault) -> None:
        if worker is None:
            return
        self._record(fault, worker.stable_name)
        self._world.checks.record_fault(worker, KEEPALIVE_S + fault.notice_s)
        await self._crash(worker, fault)
        await asyncio.sleep(fault.duration_s)
        await self._world.start_worker(worker.stable_name, self._next_address(worker, fault))

    def _next_address(self, worker: SimWorker, fault: Fault) -> str:
        return worker.address if fault.second_draw < 0.5 else self._world.new_address()

    async def workers_gone(self, fault: Fault) -> None:
        """All workers die at once; for a while no worker serves."""
        eligible = [worker for worker in self._world.workers if worker.is_serving]
        eligible = [worker for worker in eligible if worker.model == MODEL]
        self._record(fault, *(worker.stable_name for worker in eligible))
        for worker in eligible:
            self._world.checks.record_fault(worker, KEEPALIVE_S + fault.notice_s)
            await self._crash(worker, fault)
        await asyncio.sleep(fault.duration_s)
        for worker in eligible:
            await self._world.start_worker(worker.stable_name, self._next_address(worker, fault))

    async def worker_stop(self, fault: Fault) -> None:
        """The process of a worker is stopped. Its health check fails after two seconds."""
        worker = self._select_worker(fault)
        if worker is not None:
            await self._stop_worker(worker, fault)

    async def _stop_worker(self, worker: SimWorker, fault: Fault) -> None:
        self._record(fault, worker.stable_name, f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(worker, fault.duration_s + KEEPALIVE_S)
        worker.process.stop()
        worker.engine.freeze()
        await asyncio.sleep(min(2.0, fault.duration_s))
        members = self._world.store.members(NAMESPACE)
        if fault.duration_s > 2.0 and worker.is_serving:
            members.remove(worker.id)
            await asyncio.sleep(fault.duration_s - 2.0)
            if worker.is_serving and worker.lease is not None:
                members.put(worker.lease.instance)
        worker.process.resume()
        worker.engine.unfreeze()

    async def worker_freeze(self, fault: Fault) -> None:
        """The accelerator of a worker hangs; its process is healthy."""
        worker = self._select_worker(fault)
        if worker is not None:
            await self._freeze_worker(worker, fault)

    async def _freeze_worker(self, worker: SimWorker, fault: Fault) -> None:
        self._record(fault, worker.stable_name, f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(worker, fault.duration_s)
        worker.engine.freeze()
        await asyncio.sleep(fault.duration_s)
        worker.engine.unfreeze()

    async def worker_break(self, fault: Fault) -> None:
        """The engine of a worker fails all current and new requests, until it is replaced."""
        worker = self._select_worker(fault)
        if worker is None:
            return
        self._record(fault, worker.stable_name)
        self._world.checks.record_fault(worker, fault.duration_s + KEEPALIVE_S + fault.notice_s)
        worker.engine.inject_failure(WorkerLost("the accelerator is gone", retryable=True))
        await asyncio.sleep(fault.duration_s)
        if worker.is_serving:
            await self._crash(worker, fault)
            await self._world.start_worker(worker.stable_name, self._next_address(worker, fault))

    async def worker_fail(self, fault: Fault) -> None:
        """The engine of a worker fails its requests, at once or after two tokens; sometimes it
        responds to probes. Its process and its steps are healthy."""
        worker = self._select_worker(fault)
        if worker is None:
            return
        self._record(fault, worker.stable_name, f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(worker, fault.duration_s)
        worker.runner.fails_after = 0 if fault.second_draw < 0.5 else 2
        worker.runner.fails_probes = fault.far_s > 0.3
        await asyncio.sleep(fault.duration_s)
        worker.runner.fails_after = None

    async def worker_drain(self, fault: Fault) -> None:
        """A worker is replaced like in a rollout; its successor starts before or after its end."""
        worker = self._select_worker(fault)
        if worker is None:
            return
        self._record(fault, worker.stable_name)
        self._world.checks.record_fault(worker, 30.0)
        start = partial(self._world.start_worker, worker.stable_name)
        await self._replace_rolling(worker, start, fault)

    async def _replace_rolling(
        self, peer: Peer, start: Callable[[str], Coroutine[None, None, None]], fault: Fault
    ) -> None:
        """Ends a process in order; its successor starts before or after that."""
        if fault.second_draw < 0.5:
            await start(self._world.new_address())
        # The process may have ended during the wait.
        is_there = peer.is_serving if isinstance(peer, SimWorker) else peer.lease is not None
        if is_there and peer.process.is_alive:
            await self.end(peer)
        if fault.second_draw >= 0.5:
            await start(peer.address)

    async def end(self, peer: Peer) -> None:
        """A process leaves in order, and ends."""
        await peer.drain()
        await self._crash(peer, _IMMEDIATE)

    async def router_kill(self, fault: Fault) -> None:
        """A router dies, and a successor replaces it."""
        router = self._select_router(fault)
        if router is None:
            return
        self._record(fault, router.process.name)
        await self._crash(router, fault)
        await asyncio.sleep(fault.duration_s)
        await self._world.start_router(router.address)

    async def routers_kill(self, fault: Fault) -> None:
        """All routers die at once; for a while no router serves."""
        eligible = [r for r in self._world.routers if r.process.is_alive and r.lease is not None]
        self._record(fault, *(router.process.name for router in eligible))
        for router in eligible:
            await self._crash(router, fault)
        await asyncio.sleep(fault.duration_s)
        for router in eligible:
            await self._world.start_router(router.address)

    async def router_drain(self, fault: Fault) -> None:
        """A router is replaced like in a rollout."""
        router = self._select_router(fault)
        if router is None:
            return
        self._record(fault, router.process.name)
        self._world.checks.record_fault(None, NOTICE_S)
        await self._replace_rolling(router, self._world.start_router, fault)

    async def router_stop(self, fault: Fault) -> None:
        """The process of a router is stopped."""
        router = self._select_router(fault)
        if router is None:
            return
        self._record(fault, router.process.name, f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(None, fault.duration_s)
        router.process.stop()
        await asyncio.sleep(fault.duration_s)
        router.process.resume()

    def _sync_ends(self, fault: Fault) -> list[StreamEnd]:
        """Both ends of a stream between two routers, if there is one."""
        routers = [router.process for router in self._world.routers if router.process.is_alive]
        ends = [end for near in routers for far in routers for end in ends_between(near, far)]
        if not ends:
            return []
        end = select_by_draw(ends, fault.target_draw)
        assert end.peer is not None, "ends without a peer were excluded"
        self._record(fault, end.owner.name, end.peer.owner.name)
        return [end, end.peer]

    async def sync_cut(self, fault: Fault) -> None:
        """A stream between two routers breaks."""
        ends = self._sync_ends(fault)
        if ends:
            self._cut(ends[0], fault)

    async def sync_hold(self, fault: Fault) -> None:
        """A stream between two routers stalls in one or both directions."""
        ends = self._sync_ends(fault)
        await self._hold(ends if fault.second_draw < 0.5 else ends[:1], fault)

    async def sync_garbled(self, fault: Fault) -> None:
        """Routers receive updates from each other, but some content is lost."""
        if len(self._world.routers) < 2:
            return
        self._record(fault, f"{fault.duration_s:.3f}")
        self._world.sync_garble.rate += 0.3
        await asyncio.sleep(fault.duration_s)
        self._world.sync_garble.rate = max(0.0, self._world.sync_garble.rate - 0.3)

    async def frontend_stall(self, fault: Fault) -> None:
        """The event loop of a frontend is stalled, so it does not read."""
        frontend = self._select_frontend(fault)
        if frontend is None:
            return
        self._record(fault, frontend.stable_name, f"{fault.duration_s:.3f}")
        frontend.stall()
        await self._hold(tuple(frontend.process.ends), fault)
        frontend.resume()

    async def frontend_kill(self, fault: Fault) -> None:
        """A frontend dies with all its requests, and a successor replaces it."""
        frontend = self._select_frontend(fault)
        if frontend is None:
            return
        self._record(fault, frontend.stable_name)
        await self._crash(frontend, fault)
        await asyncio.sleep(fault.duration_s)
        await self._world.start_frontend(frontend.stable_name, self._world.new_address())

    async def frontend_drain(self, fault: Fault) -> None:
        """A frontend is replaced like in a rollout."""
        frontend = self._select_frontend(fault)
        if frontend is None:
            return
        self._record(fault, frontend.stable_name)
        start = partial(self._world.start_frontend, frontend.stable_name)
        await self._replace_rolling(frontend, start, replace(fault, second_draw=fault.target_draw))

    async def links_slow(self, fault: Fault) -> None:
        """All messages from and to a process are delayed."""
        peer = select_by_draw(self._world.alive(), fault.target_draw)
        lag_s = SLOW_MAX_S * fault.second_draw
        self._record(fault, peer.process.name, f"{lag_s:.3f} {fault.duration_s:.3f}")
        is_control = isinstance(peer, SimRouter | SimIndexer)
        for one in (None,) if is_control else (peer, None):
            self._world.checks.record_fault(one, fault.duration_s)
        peer.process.lag_s += lag_s
        await asyncio.sleep(fault.duration_s)
        peer.process.lag_s = max(0.0, peer.process.lag_s - lag_s)

    async def registry_lost(self, fault: Fault) -> None:
        """The registry is unreachable for all processes."""
        self._record(fault, f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(None, fault.duration_s)
        self._world.outages += 1
        for peer in self._world.all_processes():
            peer.discovery.lose()
        await asyncio.sleep(fault.duration_s)
        self._world.outages -= 1
        for peer in self._world.all_processes():
            peer.discovery.find()

    async def registry_stale(self, fault: Fault) -> None:
        """One process receives no updates from the registry."""
        eligible: list[Peer] = [*self._world.frontends, *self._world.routers, *self._world.indexers]
        if self._world.kv is not None:
            eligible += self._world.workers  # their publishers follow the indexers
        peer = select_by_draw(eligible, fault.target_draw)
        self._record(fault, peer.process.name, f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(None, fault.duration_s)
        peer.discovery.lose()
        await asyncio.sleep(fault.duration_s)
        peer.discovery.find()

    async def registry_old(self, fault: Fault) -> None:
        """Some processes receive an older snapshot of the registry after a newer one."""
        rng = Random(fault.target_draw)
        affected = [peer for peer in self._world.alive() if rng.random() < 0.5]
        self._record(fault, *(peer.process.name for peer in affected), f"{fault.duration_s:.3f}")
        for one in (None, *self._world.workers, *self._world.frontends):
            self._world.checks.record_fault(one, fault.duration_s)
        for peer in affected:
            peer.discovery.returns_stale = True
        members = self._world.store.members(NAMESPACE)
        some_instance = next(iter(members.registered.values()), None)
        if some_instance is not None:  # gone and back at once: an update without a change
            members.remove(some_instance.id)
            members.put(some_instance)
        await asyncio.sleep(fault.duration_s)
        for peer in affected:
            peer.discovery.returns_stale = False

    async def registry_flap(self, fault: Fault) -> None:
        """Some live processes vanish from the registry for a while."""
        members = self._world.store.members(NAMESPACE)
        rng = Random(fault.target_draw)
        removed = [
            peer for peer in self._world.alive() if peer.lease is not None and rng.random() < 0.5
        ]
        self._record(fault, *(peer.process.name for peer in removed), f"{fault.duration_s:.3f}")
        self._world.checks.record_fault(None, fault.duration_s)
        for peer in removed:
            members.remove(peer.id)
        await asyncio.sleep(fault.duration_s)
        for peer in removed:
            has_left = isinstance(peer, SimWorker) and peer.left_at is not None
            if peer.process.is_alive and peer.lease is not None and not has_left:
                members.put(peer.lease.instance)

    # -- faults of the KV plane -----------------------------------------------------------------

    async def prefill_kill(self, fault: Fault) -> None:
        """A prefill worker dies during a handoff."""
        await self._kill_and_replace(await self._worker_in_handoff(fault, "prefill"), fault)

    async def decode_kill(self, fault: Fault) -> None:
        """A decode worker dies while it waits for KV."""
        await self._kill_and_replace(await self._worker_in_handoff(fault, "decode"), fault)

    async def pair_kill(self, fault: Fault) -> None:
        """A prefill and a decode worker die at once."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                self._kill_and_replace(await self._worker_in_handoff(fault, "decode"), fault)
            )
            eligible = self._eligible_workers("prefill")
            if eligible:
                prefill = select_by_draw(eligible, fault.second_draw)
                tasks.create_task(self._kill_and_replace(prefill, fault))

    async def prefill_hang(self, fault: Fault) -> None:
        """A prefill worker hangs during a handoff: its accelerator, or its process."""
        await self._hang(await self._worker_in_handoff(fault, "prefill"), fault)

    async def decode_hang(self, fault: Fault) -> None:
        """A decode worker hangs while it waits for KV."""
        await self._hang(await self._worker_in_handoff(fault, "decode"), fault)

    async def _hang(self, worker: SimWorker | None, fault: Fault) -> None:
        if worker is not None:
            inject = self._freeze_worker if fault.second_draw < 0.5 else self._stop_worker
            await inject(worker, fault)

    def _handoff_end(self, fault: Fault) -> StreamEnd | None:
        """The decode side of a current handoff."""
        engines = [worker.process for worker in self._eligible_workers("prefill")]
        ends = [
            end
            for worker in self._eligible_workers("decode")
            for engine in engines
            for end in ends_between(worker.process, engine)
        ]
        return select_by_draw(ends, fault.target_draw) if ends else None

    async def _wait_for_handoff(self, fault: Fault) -> StreamEnd | None:
        for _ in range(round(HANDOFF_WAIT_S / POLL_S)):
            if (end := self._handoff_end(fault)) is not None:
                break
            await asyncio.sleep(POLL_S)
        if end is not None and end.peer is not None:
            self._record(fault, end.owner.name, end.peer.owner.name)
            for worker in self._world.workers:
                if worker.process in (end.owner, end.peer.owner):
                    self._world.checks.record_fault(worker, fault.duration_s + KEEPALIVE_S)
        return end

    async def handoff_cut(self, fault: Fault) -> None:
        """The link of one handoff breaks."""
        end = await self._wait_for_handoff(fault)
        if end is not None and end.peer is not None:
            self._cut(end, fault)

    async def handoff_hold(self, fault: Fault) -> None:
        """The link of one handoff stalls in one or both directions, then continues."""
        end = await self._wait_for_handoff(fault)
        if end is not None and end.peer is not None:
            await self._hold([end, end.peer] if fault.near_s < 1 else [end], fault)

    async def handoff_refused(self, fault: Fault) -> None:
        """The handoff address of a prefill worker is unreachable."""
        eligible = self._eligible_workers("prefill")
        if not eligible or self._world.kv is None:
            return
        worker = select_by_draw(eligible, fault.target_draw)
        handoff = worker.engine.config.handoff
        address = kv_address(handoff.host, handoff.port)
        self._record(fault, worker.stable_name, f"{fault.duration_s:.3f}")
        # Requests of all workers may fail with it.
        for one in self._world.workers:
            self._world.checks.record_fault(one, fault.duration_s)
        self._world.kv.refused.add(address)
        await asyncio.sleep(fault.duration_s)
        self._world.kv.refused.discard(address)

    async def indexer_kill(self, fault: Fault) -> None:
        """An indexer dies, and an empty one replaces it."""
        indexer = self._select_indexer(fault)
        if indexer is None:
            return
        self._record(fault, indexer.process.name)
        await self._crash(indexer, fault)
        await asyncio.sleep(fault.duration_s)
        same = fault.second_draw < 0.5
        await self._world.start_indexer(indexer.address if same else self._world.new_address())

    async def indexers_kill(self, fault: Fault) -> None:
        """All indexers die at once, and restart empty."""
        eligible = [i for i in self._world.indexers if i.process.is_alive and i.lease is not None]
        self._record(fault, *(indexer.process.name for indexer in eligible))
        for indexer in eligible:
            await self._crash(indexer, fault)
        await asyncio.sleep(fault.duration_s)
        for indexer in eligible:
            await self._world.start_indexer(indexer.address)

    async def indexer_drain(self, fault: Fault) -> None:
        """An indexer is replaced like in a rollout."""
        indexer = self._select_indexer(fault)
        if indexer is not None:
            self._record(fault, indexer.process.name)
            await self._replace_rolling(indexer, self._world.start_indexer, fault)

    async def indexer_stop(self, fault: Fault) -> None:
        """The process of an indexer is stopped."""
        indexer = self._select_indexer(fault)
        if indexer is None:
            return
        self._record(fault, indexer.process.name, f"{fault.duration_s:.3f}")
        indexer.process.stop()
        await asyncio.sleep(fault.duration_s)
        indexer.process.resume()

    async def subscriber_slow(self, fault: Fault) -> None:
        """A router takes long for each message of its indexer."""
        router = self._select_router(fault)
        if router is None or router.index is None:
            return
        slow_s = READ_DELAY_MAX_S * fault.second_draw
        self._record(fault, router.process.name, f"{slow_s:.3f} {fault.duration_s:.3f}")
        router.read_delay.slow_s += slow_s
        await asyncio.sleep(fault.duration_s)
        router.read_delay.slow_s = max(0.0, router.read_delay.slow_s - slow_s)

    def _select_indexer(self, fault: Fault) -> SimIndexer | None:
        eligible = [i for i in self._world.indexers if i.process.is_alive and i.lease is not None]
        return select_by_draw(eligible, fault.target_draw) if eligible else None

    def _feed_end(self, fault: Fault) -> StreamEnd | None:
        """A stream from a worker to an indexer, or from an indexer to a router."""
        indexer = self._select_indexer(fault)
        ends = [end for end in indexer.process.ends if end.peer is not None] if indexer else []
        if not ends:
            return None
        end = select_by_draw(ends, fault.second_draw)
        assert end.peer is not None, "ends without a peer were excluded"
        self._record(fault, end.owner.name, end.peer.owner.name)
        return end

    async def feed_cut(self, fault: Fault) -> None:
        """A stream of KV events breaks."""
        end = self._feed_end(fault)
        if end is not None:
            self._cut(end, fault)

    async def feed_hold(self, fault: Fault) -> None:
        """A stream of KV events stalls."""
        end = self._feed_end(fault)
        if end is not None:
            await self._hold([end], fault)

    async def events_garbled(self, fault: Fault) -> None:
        """Batches of KV events are lost, duplicated and reordered."""
        if self._world.kv is None:
            return
        self._record(fault, f"{fault.duration_s:.3f}")
        self._world.kv.garble.rate += 0.3
        await asyncio.sleep(fault.duration_s)
        self._world.kv.garble.rate = max(0.0, self._world.kv.garble.rate - 0.3)

    async def events_lost(self, fault: Fault) -> None:
        """An engine's events are lost before they are numbered."""
        worker = self._select_worker(fault)
        if worker is not None and worker.publisher is not None:
            self._record(fault, worker.stable_name)
            worker.has_dropped_entries = True
            worker.publisher.record_loss(0, "a fault")

    async def cache_reset(self, fault: Fault) -> None:
        """An engine evicts all blocks it can and begins a new epoch."""
        worker = self._select_worker(fault)
        if worker is not None and worker.publisher is not None:
            self._record(fault, worker.stable_name)
            worker.has_dropped_entries = True
            await worker.engine.flush_cache()
            worker.publisher.reset(0)
