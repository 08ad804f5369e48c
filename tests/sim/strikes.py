"""What each kind of fault does to a simulated mesh: a method of `Strikes` has its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from common.errors import Unavailable, WorkerLost
from common.registry.instances import Role
from tests.sim.faults import CALM_FAULTS, KEEPALIVE_S, Fault, FaultKind, picked
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
from tests.sim.net import End, ends_between
from tests.sim.wire import kv_address

if TYPE_CHECKING:
    from tests.sim.world import World

# What strikes amid a handoff waits so long for one.
AMID_S = 2.0
LOOK_S = 0.005
# How long messages travel at most while links are slow, in seconds; below what makes a worker lost.
SLOW_MAX_S = 0.6
# How long a router takes over a message of its indexer while it reads slowly; below what makes an
# indexer silent.
READS_SLOWLY_MAX_S = 4.0
# Whom no fault strikes where the first worker (of each role) is spared.
SPARED = frozenset({"w0", "p0", "d0"})
# Of a process that ends: nobody has to notice it.
_AT_ONCE = Fault(
    0.0, FaultKind.WORKER_DRAIN, 0.0, 0.0, lasts_s=0.0, near_s=0.0, far_s=0.0, notice_s=0.0
)


class Strikes:
    """The faults of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()

    async def strike(self, fault: Fault) -> None:
        """Waits for its time, and does it."""
        await asyncio.sleep(fault.at)
        strike: Callable[[Fault], Coroutine[None, None, None]] = getattr(self, fault.kind.value)
        await strike(fault)

    def _some_worker(self, fault: Fault) -> SimWorker | None:
        there = self._strikable()
        return picked(there, fault.pick) if there else None

    def _strikable(self, role: Role | None = None) -> list[SimWorker]:
        spared = SPARED if self._world.scenario.spares_first else ()
        return [
            worker
            for worker in self._world.workers
            if worker.is_serving and worker.stable_name not in spared and worker.model == MODEL
            if role in (None, worker.role)
        ]

    async def _amid_handoff(self, fault: Fault, role: Role) -> SimWorker | None:
        """Some worker of a role, one with an open room if there is one within AMID_S."""
        for _ in range(round(AMID_S / LOOK_S)):
            there = [w for w in self._strikable(role) if w.engine.loads()[0].rooms_open]
            if there:
                return picked(there, fault.pick)
            await asyncio.sleep(LOOK_S)
        there = self._strikable(role)
        return picked(there, fault.pick) if there else None

    def _some_frontend(self, fault: Fault) -> SimFrontend | None:
        there = [f for f in self._world.frontends if f.is_serving]
        return picked(there, fault.pick_too) if there else None

    def _some_router(self, fault: Fault) -> SimRouter | None:
        there = [r for r in self._world.routers if r.process.is_alive and r.lease is not None]
        return picked(there, fault.pick) if there else None

    def _note(self, fault: Fault, *facts: object) -> None:
        self._world.trace.note("fault", fault.kind.value, *facts)
        self._world.struck[fault.kind.value] += 1
        self._world.sessions.is_calm &= fault.kind in CALM_FAULTS

    def _cut(self, near: End, fault: Fault) -> None:
        """Breaks a stream; each side learns of it in its own time."""
        far = near.peer
        assert far is not None, "a stream has two ends"
        near.sever()
        error = Unavailable("the connection broke")
        self._loop.call_later(fault.near_s, near.cut, error)
        self._loop.call_later(fault.far_s, far.cut, error)

    async def _hold(self, ends: Sequence[End], fault: Fault) -> None:
        held = [end for end in ends if end.peer is not None]
        for end in held:
            end.hold()
        await asyncio.sleep(fault.lasts_s)
        for end in held:
            end.let_go()

    async def _crash(self, peer: Peer, fault: Fault) -> None:
        """Ends a process without a word."""
        for end in tuple(peer.process.ends):
            other = end.peer
            end.sever()
            if other is not None:
                self._loop.call_later(fault.near_s, other.cut, Unavailable("connection reset"))
        if isinstance(peer, SimFrontend):
            peer.die()
        else:
            peer.process.kill()
        if isinstance(peer, SimRouter):
            self._world.counts["parked at a death"] += len(peer.router.queue)
            self._world.checks.trouble(None, fault.lasts_s + fault.notice_s)
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
        """A token stream stands still, one way or both ways, then goes on."""
        ends = self._attach_ends(fault)
        far = [end.peer for end in ends if end.peer is not None]
        await self._hold([*ends, *far] if fault.near_s < 1 else ends or far, fault)

    def _attach_ends(self, fault: Fault) -> list[End]:
        """The frontend's end of one stream, if there is one between these two."""
        worker, frontend = self._some_worker(fault), self._some_frontend(fault)
        if worker is None or frontend is None:
            return []
        self._note(fault, frontend.stable_name, worker.stable_name)
        self._world.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S)
        return ends_between(frontend.process, worker.process)[:1]

    async def session_cut(self, fault: Fault) -> None:
        """The link between a frontend and its router breaks."""
        for end in self._session_ends(fault):
            self._cut(end, fault)

    async def session_hold(self, fault: Fault) -> None:
        """The link between a frontend and its router stands still."""
        await self._hold(self._session_ends(fault), fault)

    def _session_ends(self, fault: Fault) -> list[End]:
        frontend = self._some_frontend(fault)
        if frontend is None:
            return []
        self._note(fault, frontend.stable_name)
        self._world.checks.trouble(None, fault.lasts_s + KEEPALIVE_S)
        routers = [router.process for router in self._world.routers]
        return [end for router in routers for end in ends_between(frontend.process, router)]

    async def worker_kill(self, fault: Fault) -> None:
        """A worker dies, and another takes its place."""
        await self._replace(self._some_worker(fault), fault)

    async def _replace(self, worker: SimWorker | None, fault: Fault) -> None:
        if worker is None:
            return
        self._note(fault, worker.stable_name)
        self._world.checks.trouble(worker, KEEPALIVE_S + fault.notice_s)
        await self._crash(worker, fault)
        await asyncio.sleep(fault.lasts_s)
        await self._world.start_worker(worker.stable_name, self._next_address(worker, fault))

    def _next_address(self, worker: SimWorker, fault: Fault) -> str:
        return worker.address if fault.pick_too < 0.5 else self._world.new_address()

    async def workers_gone(self, fault: Fault) -> None:
        """All workers die at once; for a while nobody serves."""
        there = [worker for worker in self._world.workers if worker.is_serving]
        there = [worker for worker in there if worker.model == MODEL]
        self._note(fault, *(worker.stable_name for worker in there))
        for worker in there:
            self._world.checks.trouble(worker, KEEPALIVE_S + fault.notice_s)
            await self._crash(worker, fault)
        await asyncio.sleep(fault.lasts_s)
        for worker in there:
            await self._world.start_worker(worker.stable_name, self._next_address(worker, fault))

    async def worker_stop(self, fault: Fault) -> None:
        """A worker's whole process stands still. Its health check sees that after two seconds."""
        worker = self._some_worker(fault)
        if worker is not None:
            await self._stop_worker(worker, fault)

    async def _stop_worker(self, worker: SimWorker, fault: Fault) -> None:
        self._note(fault, worker.stable_name, f"{fault.lasts_s:.3f}")
        self._world.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S)
        worker.process.stop()
        worker.engine.freeze()
        await asyncio.sleep(min(2.0, fault.lasts_s))
        members = self._world.store.members(NAMESPACE)
        if fault.lasts_s > 2.0 and worker.is_serving:
            members.remove(worker.id)
            await asyncio.sleep(fault.lasts_s - 2.0)
            if worker.is_serving and worker.lease is not None:
                members.put(worker.lease.instance)
        worker.process.go_on()
        worker.engine.thaw()

    async def worker_freeze(self, fault: Fault) -> None:
        """A worker's accelerator hangs; its process is well."""
        worker = self._some_worker(fault)
        if worker is not None:
            await self._freeze_worker(worker, fault)

    async def _freeze_worker(self, worker: SimWorker, fault: Fault) -> None:
        self._note(fault, worker.stable_name, f"{fault.lasts_s:.3f}")
        self._world.checks.trouble(worker, fault.lasts_s)
        worker.engine.freeze()
        await asyncio.sleep(fault.lasts_s)
        worker.engine.thaw()

    async def worker_break(self, fault: Fault) -> None:
        """A worker's engine fails all it has and is given, until it is replaced."""
        worker = self._some_worker(fault)
        if worker is None:
            return
        self._note(fault, worker.stable_name)
        self._world.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S + fault.notice_s)
        worker.engine.break_down(WorkerLost("the accelerator is gone", retryable=True))
        await asyncio.sleep(fault.lasts_s)
        if worker.is_serving:
            await self._crash(worker, fault)
            await self._world.start_worker(worker.stable_name, self._next_address(worker, fault))

    async def worker_drain(self, fault: Fault) -> None:
        """A worker is replaced as in a rollout, its successor before or after it."""
        worker = self._some_worker(fault)
        if worker is None:
            return
        self._note(fault, worker.stable_name)
        self._world.checks.trouble(worker, 30.0)
        start = partial(self._world.start_worker, worker.stable_name)
        await self._roll(worker, start, fault)

    async def _roll(
        self, peer: Peer, start: Callable[[str], Coroutine[None, None, None]], fault: Fault
    ) -> None:
        """Ends a process in order; its successor comes before that, or after it."""
        if fault.pick_too < 0.5:
            await start(self._world.new_address())
        # Still, after the wait.
        is_there = peer.is_serving if isinstance(peer, SimWorker) else peer.lease is not None
        if is_there and peer.process.is_alive:
            await self.end(peer)
        if fault.pick_too >= 0.5:
            await start(peer.address)

    async def end(self, peer: Peer) -> None:
        """A process leaves in order, and ends."""
        await peer.drain()
        await self._crash(peer, _AT_ONCE)

    async def router_kill(self, fault: Fault) -> None:
        """A router dies, and another takes its place."""
        router = self._some_router(fault)
        if router is None:
            return
        self._note(fault, router.process.name)
        await self._crash(router, fault)
        await asyncio.sleep(fault.lasts_s)
        await self._world.start_router(router.address)

    async def routers_kill(self, fault: Fault) -> None:
        """All routers die at once; for a while nobody routes."""
        there = [r for r in self._world.routers if r.process.is_alive and r.lease is not None]
        self._note(fault, *(router.process.name for router in there))
        for router in there:
            await self._crash(router, fault)
        await asyncio.sleep(fault.lasts_s)
        for router in there:
            await self._world.start_router(router.address)

    async def router_drain(self, fault: Fault) -> None:
        """A router is replaced as in a rollout."""
        router = self._some_router(fault)
        if router is None:
            return
        self._note(fault, router.process.name)
        self._world.checks.trouble(None, NOTICE_S)
        await self._roll(router, self._world.start_router, fault)

    async def router_stop(self, fault: Fault) -> None:
        """A router stands still."""
        router = self._some_router(fault)
        if router is None:
            return
        self._note(fault, router.process.name, f"{fault.lasts_s:.3f}")
        self._world.checks.trouble(None, fault.lasts_s)
        router.process.stop()
        await asyncio.sleep(fault.lasts_s)
        router.process.go_on()

    def _sync_ends(self, fault: Fault) -> list[End]:
        """Both ends of a stream between two routers, if there is one."""
        routers = [router.process for router in self._world.routers if router.process.is_alive]
        ends = [end for near in routers for far in routers for end in ends_between(near, far)]
        if not ends:
            return []
        end = picked(ends, fault.pick)
        assert end.peer is not None, "such ends were left out"
        self._note(fault, end.owner.name, end.peer.owner.name)
        return [end, end.peer]

    async def sync_cut(self, fault: Fault) -> None:
        """A stream between two routers breaks."""
        ends = self._sync_ends(fault)
        if ends:
            self._cut(ends[0], fault)

    async def sync_hold(self, fault: Fault) -> None:
        """A stream between two routers stands still, one way or both ways."""
        ends = self._sync_ends(fault)
        await self._hold(ends if fault.pick_too < 0.5 else ends[:1], fault)

    async def sync_garbled(self, fault: Fault) -> None:
        """Routers hear from others, but some of what those tell is lost."""
        if len(self._world.routers) < 2:
            return
        self._note(fault, f"{fault.lasts_s:.3f}")
        self._world.sync_garble.rate += 0.3
        await asyncio.sleep(fault.lasts_s)
        self._world.sync_garble.rate = max(0.0, self._world.sync_garble.rate - 0.3)

    async def frontend_stall(self, fault: Fault) -> None:
        """A frontend does not get round to reading."""
        frontend = self._some_frontend(fault)
        if frontend is None:
            return
        self._note(fault, frontend.stable_name, f"{fault.lasts_s:.3f}")
        frontend.stall()
        await self._hold(tuple(frontend.process.ends), fault)
        frontend.go_on()

    async def frontend_kill(self, fault: Fault) -> None:
        """A frontend dies with all its requests, and another takes its place."""
        frontend = self._some_frontend(fault)
        if frontend is None:
            return
        self._note(fault, frontend.stable_name)
        await self._crash(frontend, fault)
        await asyncio.sleep(fault.lasts_s)
        await self._world.start_frontend(frontend.stable_name, self._world.new_address())

    async def frontend_drain(self, fault: Fault) -> None:
        """A frontend is replaced as in a rollout."""
        frontend = self._some_frontend(fault)
        if frontend is None:
            return
        self._note(fault, frontend.stable_name)
        start = partial(self._world.start_frontend, frontend.stable_name)
        await self._roll(frontend, start, replace(fault, pick_too=fault.pick))

    async def links_slow(self, fault: Fault) -> None:
        """All that comes from a process, or goes to it, travels long."""
        peer = picked(self._world.alive(), fault.pick)
        lag_s = SLOW_MAX_S * fault.pick_too
        self._note(fault, peer.process.name, f"{lag_s:.3f} {fault.lasts_s:.3f}")
        is_control = isinstance(peer, SimRouter | SimIndexer)
        for one in (None,) if is_control else (peer, None):
            self._world.checks.trouble(one, fault.lasts_s)
        peer.process.lag_s += lag_s
        await asyncio.sleep(fault.lasts_s)
        peer.process.lag_s = max(0.0, peer.process.lag_s - lag_s)

    async def registry_lost(self, fault: Fault) -> None:
        """Nobody can reach the registry."""
        self._note(fault, f"{fault.lasts_s:.3f}")
        self._world.checks.trouble(None, fault.lasts_s)
        self._world.outages += 1
        for peer in self._world.everybody():
            peer.discovery.lose()
        await asyncio.sleep(fault.lasts_s)
        self._world.outages -= 1
        for peer in self._world.everybody():
            peer.discovery.find()

    async def registry_stale(self, fault: Fault) -> None:
        """One frontend or router hears nothing from the registry."""
        there: list[Peer] = [*self._world.frontends, *self._world.routers, *self._world.indexers]
        if self._world.kv is not None:
            there += self._world.workers  # their publishers follow the indexers
        peer = picked(there, fault.pick)
        self._note(fault, peer.process.name, f"{fault.lasts_s:.3f}")
        self._world.checks.trouble(None, fault.lasts_s)
        peer.discovery.lose()
        await asyncio.sleep(fault.lasts_s)
        peer.discovery.find()

    async def registry_old(self, fault: Fault) -> None:
        """To some, news from the registry comes after what was there before it."""
        rng = Random(fault.pick)
        those = [peer for peer in self._world.alive() if rng.random() < 0.5]
        self._note(fault, *(peer.process.name for peer in those), f"{fault.lasts_s:.3f}")
        for one in (None, *self._world.workers, *self._world.frontends):
            self._world.checks.trouble(one, fault.lasts_s)
        for peer in those:
            peer.discovery.shows_old = True
        members = self._world.store.members(NAMESPACE)
        known = next(iter(members.registered.values()), None)
        if known is not None:  # gone and back at once: there is news, and it says nothing new
            members.remove(known.id)
            members.put(known)
        await asyncio.sleep(fault.lasts_s)
        for peer in those:
            peer.discovery.shows_old = False

    async def registry_flap(self, fault: Fault) -> None:
        """Some processes vanish from the registry for a while, though they live."""
        members = self._world.store.members(NAMESPACE)
        rng = Random(fault.pick)
        gone = [
            peer for peer in self._world.alive() if peer.lease is not None and rng.random() < 0.5
        ]
        self._note(fault, *(peer.process.name for peer in gone), f"{fault.lasts_s:.3f}")
        self._world.checks.trouble(None, fault.lasts_s)
        for peer in gone:
            members.remove(peer.id)
        await asyncio.sleep(fault.lasts_s)
        for peer in gone:
            has_left = isinstance(peer, SimWorker) and peer.left_at is not None
            if peer.process.is_alive and peer.lease is not None and not has_left:
                members.put(peer.lease.instance)

    # -- faults of the KV plane -----------------------------------------------------------------

    async def prefill_kill(self, fault: Fault) -> None:
        """A prefill worker dies amid a handoff."""
        await self._replace(await self._amid_handoff(fault, "prefill"), fault)

    async def decode_kill(self, fault: Fault) -> None:
        """A decode worker dies while it waits for KV."""
        await self._replace(await self._amid_handoff(fault, "decode"), fault)

    async def pair_kill(self, fault: Fault) -> None:
        """A prefill and a decode worker die at once."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replace(await self._amid_handoff(fault, "decode"), fault))
            there = self._strikable("prefill")
            if there:
                prefill = picked(there, fault.pick_too)
                tasks.create_task(self._replace(prefill, fault))

    async def prefill_hang(self, fault: Fault) -> None:
        """A prefill worker hangs amid a handoff: its accelerator, or all of it."""
        await self._hang(await self._amid_handoff(fault, "prefill"), fault)

    async def decode_hang(self, fault: Fault) -> None:
        """A decode worker hangs while it waits for KV."""
        await self._hang(await self._amid_handoff(fault, "decode"), fault)

    async def _hang(self, worker: SimWorker | None, fault: Fault) -> None:
        if worker is not None:
            strike = self._freeze_worker if fault.pick_too < 0.5 else self._stop_worker
            await strike(worker, fault)

    def _handoff_end(self, fault: Fault) -> End | None:
        """The decode side of some handoff that is under way."""
        engines = [worker.process for worker in self._strikable("prefill")]
        ends = [
            end
            for worker in self._strikable("decode")
            for engine in engines
            for end in ends_between(worker.process, engine)
        ]
        return picked(ends, fault.pick) if ends else None

    async def _soon(self, fault: Fault) -> End | None:
        for _ in range(round(AMID_S / LOOK_S)):
            if (end := self._handoff_end(fault)) is not None:
                break
            await asyncio.sleep(LOOK_S)
        if end is not None and end.peer is not None:
            self._note(fault, end.owner.name, end.peer.owner.name)
            for worker in self._world.workers:
                if worker.process in (end.owner, end.peer.owner):
                    self._world.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S)
        return end

    async def handoff_cut(self, fault: Fault) -> None:
        """The link of one handoff breaks."""
        end = await self._soon(fault)
        if end is not None and end.peer is not None:
            self._cut(end, fault)

    async def handoff_hold(self, fault: Fault) -> None:
        """The link of one handoff stands still, one way or both ways, then goes on."""
        end = await self._soon(fault)
        if end is not None and end.peer is not None:
            await self._hold([end, end.peer] if fault.near_s < 1 else [end], fault)

    async def handoff_refused(self, fault: Fault) -> None:
        """A prefill worker's handoffs are out of reach."""
        there = self._strikable("prefill")
        if not there or self._world.kv is None:
            return
        worker = picked(there, fault.pick)
        handoff = worker.engine.config.handoff
        address = kv_address(handoff.host, handoff.port)
        self._note(fault, worker.stable_name, f"{fault.lasts_s:.3f}")
        # Whoever was with it, or would have been, fails with it.
        for one in self._world.workers:
            self._world.checks.trouble(one, fault.lasts_s)
        self._world.kv.refused.add(address)
        await asyncio.sleep(fault.lasts_s)
        self._world.kv.refused.discard(address)

    async def indexer_kill(self, fault: Fault) -> None:
        """An indexer dies, and an empty one takes its place."""
        indexer = self._some_indexer(fault)
        if indexer is None:
            return
        self._note(fault, indexer.process.name)
        await self._crash(indexer, fault)
        await asyncio.sleep(fault.lasts_s)
        same = fault.pick_too < 0.5
        await self._world.start_indexer(indexer.address if same else self._world.new_address())

    async def indexers_kill(self, fault: Fault) -> None:
        """All indexers die at once, and come back empty."""
        there = [i for i in self._world.indexers if i.process.is_alive and i.lease is not None]
        self._note(fault, *(indexer.process.name for indexer in there))
        for indexer in there:
            await self._crash(indexer, fault)
        await asyncio.sleep(fault.lasts_s)
        for indexer in there:
            await self._world.start_indexer(indexer.address)

    async def indexer_drain(self, fault: Fault) -> None:
        """An indexer is replaced as in a rollout."""
        indexer = self._some_indexer(fault)
        if indexer is not None:
            self._note(fault, indexer.process.name)
            await self._roll(indexer, self._world.start_indexer, fault)

    async def indexer_stop(self, fault: Fault) -> None:
        """An indexer stands still."""
        indexer = self._some_indexer(fault)
        if indexer is None:
            return
        self._note(fault, indexer.process.name, f"{fault.lasts_s:.3f}")
        indexer.process.stop()
        await asyncio.sleep(fault.lasts_s)
        indexer.process.go_on()

    async def subscriber_slow(self, fault: Fault) -> None:
        """A router takes long over each message of its indexer."""
        router = self._some_router(fault)
        if router is None or router.index is None:
            return
        slow_s = READS_SLOWLY_MAX_S * fault.pick_too
        self._note(fault, router.process.name, f"{slow_s:.3f} {fault.lasts_s:.3f}")
        router.pace.slow_s += slow_s
        await asyncio.sleep(fault.lasts_s)
        router.pace.slow_s = max(0.0, router.pace.slow_s - slow_s)

    def _some_indexer(self, fault: Fault) -> SimIndexer | None:
        there = [i for i in self._world.indexers if i.process.is_alive and i.lease is not None]
        return picked(there, fault.pick) if there else None

    def _feed_end(self, fault: Fault) -> End | None:
        """Some stream from a worker to an indexer, or from there to a router."""
        indexer = self._some_indexer(fault)
        ends = [end for end in indexer.process.ends if end.peer is not None] if indexer else []
        if not ends:
            return None
        end = picked(ends, fault.pick_too)
        assert end.peer is not None, "those without were left out"
        self._note(fault, end.owner.name, end.peer.owner.name)
        return end

    async def feed_cut(self, fault: Fault) -> None:
        """A stream of KV events breaks."""
        end = self._feed_end(fault)
        if end is not None:
            self._cut(end, fault)

    async def feed_hold(self, fault: Fault) -> None:
        """A stream of KV events stands still."""
        end = self._feed_end(fault)
        if end is not None:
            await self._hold([end], fault)

    async def events_garbled(self, fault: Fault) -> None:
        """Batches of KV events are lost, doubled and overtaken."""
        if self._world.kv is None:
            return
        self._note(fault, f"{fault.lasts_s:.3f}")
        self._world.kv.garble.rate += 0.3
        await asyncio.sleep(fault.lasts_s)
        self._world.kv.garble.rate = max(0.0, self._world.kv.garble.rate - 0.3)

    async def events_lost(self, fault: Fault) -> None:
        """An engine's events are lost before they are numbered."""
        worker = self._some_worker(fault)
        if worker is not None and worker.publisher is not None:
            self._note(fault, worker.stable_name)
            worker.has_forgotten = True
            worker.publisher.lose(0, "a fault")

    async def cache_reset(self, fault: Fault) -> None:
        """An engine evicts all it can and begins a new epoch."""
        worker = self._some_worker(fault)
        if worker is not None and worker.publisher is not None:
            self._note(fault, worker.stable_name)
            worker.has_forgotten = True
            worker.engine.flush_cache()
            worker.publisher.reset(0)
